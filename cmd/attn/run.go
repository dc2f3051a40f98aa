package main

import (
	"context"
	"errors"
	"fmt"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/nn"
)

// runCmd is attn run: attention over .npy files.
type runCmd struct {
	problemFlags

	Problem      string `name:"problem" placeholder:"FILE.json" group:"Inputs" help:"Take what to compute from a file that --print-problem printed, instead of from flags."`
	PrintProblem bool   `name:"print-problem" help:"Print what would be computed as JSON, in canonical form, and stop: only the files' headers are read."`

	Out         string `name:"out" placeholder:"O.npy" group:"Outputs" help:"Output, in q's rank and layout: f4, or f2 for f16. bf16 is written as f4, as numpy has no such type. Needed unless --plan or --print-problem."`
	LSE         string `name:"lse" placeholder:"L.npy" group:"Outputs" help:"Also write the rows' log-sum-exp, [B,H,Sq] of f4, [H,total] of packed sequences."`
	Weights     string `name:"weights" placeholder:"W.npy" group:"Outputs" help:"Also write the softmax weights, [B,H,Sq,Sk] of f4; takes that much memory."`
	Scores      string `name:"scores" placeholder:"S.npy" group:"Outputs" help:"Also write the scores, [B,H,Sq,Sk] of f4; takes that much memory."`
	ScoresAt    string `name:"scores-at" enum:"scaled,capped,biased" default:"biased" group:"Outputs" help:"Where: scaled, with the softcap too (capped), or with all that is added and -Inf for what is hidden (biased)."`
	TopK        int    `name:"topk" placeholder:"N" group:"Outputs" help:"Find the N largest weights of each query, without keeping all."`
	TopKKeys    string `name:"topk-keys" placeholder:"I.npy" group:"Outputs" help:"Write which keys have them, [B,H,Sq,N] of i4, largest first; -1 where there are fewer."`
	TopKWeights string `name:"topk-weights" placeholder:"W.npy" group:"Outputs" help:"Write these weights, [B,H,Sq,N] of f4."`
	KeepMask    string `name:"keep-mask" placeholder:"M.npy" group:"Outputs" help:"Also write which weights --dropout keeps, [B,H,Sq,Sk] of bool."`
	PresentK    string `name:"present-k" placeholder:"K.npy" group:"Outputs" help:"Also write the keys with those from before, as --k."`
	PresentV    string `name:"present-v" placeholder:"V.npy" group:"Outputs" help:"Also write the values with those from before, as --v."`

	Check bool `name:"check" help:"Recompute sampled rows in float64, print the largest error and its bound, and fail when it is over."`
	Plan  bool `name:"plan" help:"Print how the call would run, and stop: only the files' headers are read."`
}

// Run computes the call, or plans it.
func (c *runCmd) Run(ctx context.Context, out *streams) error {
	if c.Out == "" && !c.Plan && !c.PrintProblem {
		return errors.New("--out is missing: where to write the output")
	}
	p, in, err := c.open()
	if err != nil {
		return err
	}
	if err := c.pairsWanted(p); err != nil {
		return err
	}
	if c.PrintProblem {
		return p.print(out.out)
	}
	opt := c.options(p)
	var files outputs
	defer files.discard()
	if !c.Plan {
		if err := c.addOutputs(&files); err != nil {
			return err
		}
	}
	be, err := backend.Open(c.Backend)
	if err != nil {
		return err
	}
	defer be.Close()
	// Planned with the headers alone, a call that cannot run fails before its
	// data is read.
	plan, err := in.plan(be, opt)
	if err != nil {
		return err
	}
	if c.Plan {
		return printPlan(out.out, be, in, plan)
	}
	if err := in.fitMemory(); err != nil {
		return err
	}
	calc := calculation{be: be, in: in, note: out.err}
	defer calc.release()
	if err := calc.load(ctx, opt); err != nil {
		return err
	}
	if r := p.RoPE; r != nil {
		if err := calc.turn(ctx, nn.RoPE{Base: r.Base, Dim: r.Dim, Interleaved: r.Interleaved}); err != nil {
			return err
		}
	}
	if err := calc.attend(ctx, c.LSE != "", c.Weights != ""); err != nil {
		return err
	}
	if c.Check {
		if err := calc.check(ctx, out.out); err != nil {
			return err
		}
	}
	if err := calc.write(ctx, &files); err != nil {
		return err
	}
	if err := c.writePairs(ctx, &calc, &files); err != nil {
		return err
	}
	return files.commit(ctx)
}

// open returns the problem that flags or a file pose, in canonical form, with its files
// open.
func (c *runCmd) open() (*problem, *runInputs, error) {
	var p *problem
	var err error
	switch {
	case c.Problem == "":
		p, err = c.problemFlags.problem()
	case c.given():
		err = fmt.Errorf("--problem %s says what to compute, flags that say it too cannot stand beside it", c.Problem)
	default:
		p, err = readProblem(c.Problem)
	}
	if err != nil {
		return nil, nil, err
	}
	in, err := p.inputs()
	if err != nil {
		return nil, nil, err
	}
	t, err := in.meta()
	if err != nil {
		return nil, nil, err
	}
	d := (&backend.Call{Q: t[0], K: t[1], V: t[2]}).Dims()
	if c.ALiBi.text == autoSlopes {
		p.ALiBi = paperSlopes(d.Heads)
	}
	return p, in, p.resolve(d, in.pastKeys())
}

// options are the call's, with the outputs that are wanted and without what needs the
// data of files.
func (c *runCmd) options(p *problem) kernels.Options {
	opt := p.options()
	opt.LSE, opt.Weights = c.LSE != "", c.Weights != ""
	return opt
}

func (c *runCmd) addOutputs(files *outputs) error {
	for _, f := range []struct{ flag, path string }{
		{"out", c.Out}, {"lse", c.LSE}, {"weights", c.Weights}, {"present-k", c.PresentK}, {"present-v", c.PresentV},
		{"scores", c.Scores}, {"topk-keys", c.TopKKeys}, {"topk-weights", c.TopKWeights}, {"keep-mask", c.KeepMask},
	} {
		if f.path == "" {
			continue
		}
		if err := files.add(f.flag, f.path); err != nil {
			return err
		}
	}
	return nil
}

// plan plans the call on tensors without memory. It validates everything that
// does not need the data.
func (in *runInputs) plan(be backend.Backend, opt kernels.Options) (backend.Plan, error) {
	t, err := in.meta()
	if err != nil {
		return backend.Plan{}, err
	}
	for _, f := range in.pairs {
		m, err := backend.Meta(f.dtype(), f.shape)
		if err != nil {
			return backend.Plan{}, fmt.Errorf("--%s %s: %w", f.name, f.path, err)
		}
		f.put(&opt, m)
	}
	if in.packed {
		return kernels.PlanVarlen(be, t[0], t[1], t[2], in.cuQ, in.cuK, opt)
	}
	return kernels.Plan(be, t[0], t[1], t[2], opt)
}

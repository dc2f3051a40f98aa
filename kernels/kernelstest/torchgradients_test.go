package kernelstest

import (
	"encoding/json"
	"flag"
	"os"
	"testing"

	"pgregory.net/rapid"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/backend/oracle"
	"github.com/seed90331342/attn/cpu"
	"github.com/seed90331342/attn/kernels"
)

var updateTorch = flag.Bool("update-torch", false, "write the gradients that PyTorch computes instead of comparing them")

// gradients sends the problem of the gradients of a case, whose hidden NaN become 0.
func (p *torch) gradients(b *built, do, dlse operand) (torchAnswer, error) {
	problem := b.torchProblem()
	problem.Op, problem.Softcap = "gradients", b.Options.Softcap
	problem.K, problem.V = raw(withoutNaN(b.k.data)), raw(withoutNaN(b.v.data))
	problem.DO, problem.DLSE = raw(withoutNaN(do.data)), raw(withoutNaN(dlse.data))
	if drop := b.Options.Dropout; drop.P > 0 {
		var keep []float32
		for n := range b.Batch * b.Heads * b.SeqQ * b.SeqK {
			row := n / b.SeqK
			factor := float32(0)
			if drop.Keeps(row/b.SeqQ/b.Heads, row/b.SeqQ%b.Heads, row%b.SeqQ, n%b.SeqK) {
				factor = 1
			}
			keep = append(keep, factor)
		}
		problem.Keep, problem.KeepFactor = raw(keep), 1/(1-float64(drop.P))
	}
	return p.solve(problem)
}

// exactly returns the values of sums.
func exactly(sums [7][]oracle.Sum) (x [7][]float64) {
	for n := range sums {
		for _, s := range sums[n] {
			x[n] = append(x[n], s.Value)
		}
	}
	return x
}

// TestTorchGradients compares PyTorch's autograd in float64 with the oracle, the CPU backend
// and PyTorch in float32, and with the recorded gradients, which -update-torch writes.
func TestTorchGradients(t *testing.T) {
	peer := startTorch(t)
	ofDoubles := func(_ int, s *oracle.Sum) float64 { return 2 * toDouble * s.Bound(backend.F32) }
	ofFloats := func(_ int, s *oracle.Sum) float64 { return s.Bound(backend.F32) }
	var records, recorded []torchRecord
	noError(t, json.Unmarshal(torchFile, &recorded))
	for n, c := range torchCases() {
		b := c.build()
		do, dlse := b.loss(solve(b, nil).lse)
		a := must(peer.gradients(b, do, dlse))(t)
		sums := b.differentiate(do, dlse)
		r := torchRecord{Case: c.String()}
		var was [7][]float64
		for i, x := range a.gradients {
			for _, y := range x {
				r.Gradients[i] = appendDouble(r.Gradients[i], y)
			}
			if n < len(recorded) {
				was[i] = doubles(recorded[n].Gradients[i])
			}
		}
		records = append(records, r)
		if worst := nearby(was, a.gradients, sums, ofDoubles); worst.Err() != nil && !*updateTorch {
			t.Errorf("recorded: %v: %v", c, worst.Err())
		}
	}
	if *updateTorch {
		text, err := json.MarshalIndent(records, "", " ")
		if err == nil {
			err = os.WriteFile("testdata/torch-gradients.json", append(text, '\n'), 0o644)
		}
		if err != nil {
			t.Fatal(err)
		}
	}

	dev := kernels.NewDevice(cpu.New(cpu.Options{}))
	defer dev.Close()
	problems, elements := 0, 0
	var mine, exact, single float64
	check(t, draws(500, 500), func(rt *rapid.T) {
		c := drawCase(rt)
		c.Options.ScoreMod = nil // a function in Go
		on := c.build().on(t, dev)
		defer on.release()
		x := on.forward(t)
		got := must(x.backward(t))(rt)
		a := must(peer.gradients(on.built, x.do, x.dlse))(rt)
		sums := x.differentiate(x.do, x.dlse)
		for _, of := range []struct {
			name  string
			worst oracle.Worst
			most  *float64
		}{
			{"CPU", nearby(got, a.gradients, sums, func(n int, s *oracle.Sum) float64 { return s.Bound(x.gradientType(n)) }), &mine},
			{"oracle", nearby(exactly(sums), a.gradients, sums, ofDoubles), &exact},
			{"PyTorch in float32", nearby(a.single, exactly(sums), sums, ofFloats), &single},
		} {
			if err := of.worst.Err(); err != nil {
				rt.Fatalf("%s: %v: %v", of.name, c, err)
			}
			*of.most = max(*of.most, of.worst.Off)
			elements = elements + of.worst.Considered
		}
		problems++
	})
	t.Logf("PyTorch %s: gradients of %d problems, %d elements: off by at most %.2g of the bound in float32 on the CPU, %.2g of float64's in the reference, %.2g in PyTorch's float32",
		peer.version, problems, elements/3, mine, exact, single)
}

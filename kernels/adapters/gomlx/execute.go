package gomlx

import (
	"fmt"

	"github.com/gomlx/compute"
	"github.com/gomlx/compute/shapes"
)

func (p *program) Inputs() ([]string, []shapes.Shape) { return p.names, p.inputs }
func (p *program) Outputs() []shapes.Shape            { return p.shapes }

func (p *program) Finalize() {
	for _, s := range p.stages {
		if s.exec != nil {
			s.exec.Finalize()
		}
	}
	p.stages = nil
}

// Execute runs the stages in order. Programs may run at the same time.
func (p *program) Execute(inputs []compute.Buffer, donate []bool, device compute.DeviceNum) ([]compute.Buffer, error) {
	if len(inputs) != len(p.inputs) || len(donate) != 0 && len(donate) != len(inputs) {
		return nil, fmt.Errorf("gomlx: there are %d inputs, %d of them with a donation, the program has %d parameters", len(inputs), len(donate), len(p.inputs))
	}
	slots := make([]compute.Buffer, len(p.last))
	for i, in := range inputs {
		buf, ok := in.(*buffer)
		if !ok || buf.b != p.b {
			return nil, fmt.Errorf("gomlx: input %d is a %T, not a buffer of this backend", i, in)
		}
		slots[i] = buf.Buffer
	}
	owned := func(slot int) bool { return slot >= len(inputs) || len(donate) > 0 && donate[slot] }
	free := func(step int) {
		for slot, buf := range slots {
			if buf != nil && p.last[slot] == step && owned(slot) {
				buf.Finalize()
				slots[slot] = nil
			}
		}
	}
	free(-1)
	for n, s := range p.stages {
		if s.exec != nil {
			in, consumed := make([]compute.Buffer, len(s.in)), make([]bool, len(s.in))
			for i, slot := range s.in {
				in[i], consumed[i] = slots[slot], owned(slot) && p.last[slot] == 2*n
				if consumed[i] {
					slots[slot] = nil
				}
			}
			out, err := s.exec.Execute(in, consumed, device)
			if err != nil {
				return nil, err
			}
			for i, slot := range s.out {
				slots[slot] = out[i]
			}
		}
		for _, c := range s.calls {
			if err := c.run(p.b, slots); err != nil {
				return nil, err
			}
		}
		free(2*n + 1)
	}
	outputs := make([]compute.Buffer, len(p.outputs))
	for i, slot := range p.outputs {
		outputs[i] = &buffer{slots[slot], p.b}
	}
	return outputs, nil
}

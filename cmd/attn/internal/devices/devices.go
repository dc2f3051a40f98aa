// Package devices is the command attn devices.
package devices

import (
	"bytes"
	"context"
	"fmt"
	"strings"
	"text/tabwriter"

	"github.com/seed90331342/attn/bench/plain"
	"github.com/seed90331342/attn/cmd/internal/cli"
	"github.com/seed90331342/attn/kernels"
)

// Command is attn devices. A family of backends without a device is part of the result, not a failure.
type Command struct {
	JSON bool `name:"json" help:"Print JSON."`
}

// Report is the output of attn devices --json.
type Report struct {
	Auto struct { // the meaning of the backend name auto on this machine
		Name string `json:"name"`
		Why  string `json:"why"`
	} `json:"auto"`
	Families []Family `json:"families"`
}

// Family is a family of backends. Error is the reason for an empty Devices.
type Family struct {
	Family  string         `json:"family"`
	Devices []kernels.Info `json:"devices"`
	Error   string         `json:"error,omitempty"`
}

// Run prints the devices.
func (c *Command) Run(_ context.Context, out *cli.Streams) error {
	r := Report{Families: []Family{}}
	r.Auto.Name, r.Auto.Why = kernels.Auto()
	for _, l := range kernels.Devices() {
		f := Family{Family: l.Family, Devices: append([]kernels.Info{}, l.Infos...)}
		if l.Err != nil {
			f.Error = l.Err.Error()
		}
		r.Families = append(r.Families, f)
	}
	if c.JSON {
		return out.PrintJSON(r)
	}
	_, err := out.Out.Write(r.text())
	return err
}

// text formats the report: a block for each device.
func (r Report) text() []byte {
	var buf bytes.Buffer
	for _, f := range r.Families {
		if len(f.Devices) == 0 {
			why := "no device"
			if f.Error != "" {
				why = plain.Line(f.Error)
			}
			fmt.Fprintf(&buf, "%s: none (%s)\n\n", f.Family, why)
		}
		for _, d := range f.Devices {
			fmt.Fprintf(&buf, "%s: %s\n", d.Name, plain.Line(d.Device))
			w := tabwriter.NewWriter(&buf, 0, 0, 2, ' ', 0)
			rows := [][2]string{{"type", string(d.Type)}, {"provider", d.Provider}, {"driver", d.Driver}, {"features", strings.Join(d.Features, ", ")}}
			if d.Threads > 0 {
				rows = append(rows, [2]string{"threads", fmt.Sprint(d.Threads)})
			}
			for _, l := range d.Limits {
				rows = append(rows, [2]string{l.Name, cli.Limit(l)})
			}
			for _, row := range rows {
				if row[1] != "" {
					fmt.Fprintf(w, "  %s\t%s\n", row[0], plain.Line(row[1]))
				}
			}
			w.Flush() // cannot fail on a bytes.Buffer
			buf.WriteByte('\n')
		}
	}
	fmt.Fprintf(&buf, "auto: %s (%s)\n", r.Auto.Name, r.Auto.Why)
	return buf.Bytes()
}

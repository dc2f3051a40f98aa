package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"text/tabwriter"

	"github.com/seed90331342/attn/backend"
)

// devicesCmd is attn devices. A family of backends without a device is an
// answer, not a failure.
type devicesCmd struct {
	JSON bool `name:"json" help:"Print JSON."`
}

// devicesReport is what attn devices --json prints.
type devicesReport struct {
	Auto     autoReport     `json:"auto"`
	Families []familyReport `json:"families"`
}

// autoReport is what the backend name auto stands for on this machine.
type autoReport struct {
	Name string `json:"name"`
	Why  string `json:"why"`
}

// familyReport is one family of backends; Error says why Devices is empty.
type familyReport struct {
	Family  string         `json:"family"`
	Devices []backend.Info `json:"devices"`
	Error   string         `json:"error,omitempty"`
}

// Run prints the devices.
func (c *devicesCmd) Run(_ context.Context, out *streams) error {
	report := listDevices()
	if c.JSON {
		enc := json.NewEncoder(out.out)
		enc.SetIndent("", "  ")
		return enc.Encode(report)
	}
	_, err := out.out.Write(report.text())
	return err
}

func listDevices() devicesReport {
	var r devicesReport
	r.Auto.Name, r.Auto.Why = backend.Auto()
	r.Families = []familyReport{}
	for _, l := range backend.Devices() {
		f := familyReport{Family: l.Family, Devices: l.Infos}
		if f.Devices == nil {
			f.Devices = []backend.Info{}
		}
		if l.Err != nil {
			f.Error = l.Err.Error()
		}
		r.Families = append(r.Families, f)
	}
	return r
}

// text lays the report out for reading: a block for each device.
func (r devicesReport) text() []byte {
	var buf bytes.Buffer
	for _, f := range r.Families {
		if len(f.Devices) == 0 {
			why := f.Error
			if why == "" {
				why = "no device"
			}
			fmt.Fprintf(&buf, "%s: none (%s)\n\n", f.Family, strings.ReplaceAll(why, "\n", "; "))
		}
		for _, d := range f.Devices {
			fmt.Fprintf(&buf, "%s: %s\n", d.Name, d.Device)
			w := tabwriter.NewWriter(&buf, 0, 0, 2, ' ', 0)
			line := func(name, value string) {
				if value != "" {
					fmt.Fprintf(w, "  %s\t%s\n", name, value)
				}
			}
			line("type", string(d.Type))
			line("provider", d.Provider)
			line("driver", d.Driver)
			if d.Threads > 0 {
				line("threads", fmt.Sprint(d.Threads))
			}
			for _, l := range d.Limits {
				line(l.Name, quantity(l))
			}
			w.Flush() // into a bytes.Buffer, which takes everything
			buf.WriteByte('\n')
		}
	}
	fmt.Fprintf(&buf, "auto: %s (%s)\n", r.Auto.Name, r.Auto.Why)
	return buf.Bytes()
}

// quantity prints a limit; those in bytes, told by their WebGPU names
// (maxWorkgroupSizeX counts threads), in binary units beside the number.
func quantity(l backend.Limit) string {
	name := strings.ToLower(l.Name)
	for _, part := range []string{"bytes", "memory", "buffersize", "bindingsize", "storagesize"} {
		if s := bytesText(l.Value); strings.Contains(name, part) && !strings.HasSuffix(s, " bytes") {
			return fmt.Sprintf("%d (%s)", l.Value, s)
		}
	}
	return fmt.Sprint(l.Value)
}

// bytesText prints a number of bytes in the largest binary unit below it.
func bytesText(n int64) string {
	units := []string{"bytes", "KiB", "MiB", "GiB", "TiB"}
	x, u := float64(n), 0
	for x >= 1024 && u < len(units)-1 {
		x /= 1024
		u++
	}
	if x == float64(int64(x)) {
		return fmt.Sprintf("%.0f %s", x, units[u])
	}
	return fmt.Sprintf("%.1f %s", x, units[u])
}

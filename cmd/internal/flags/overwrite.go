package flags

import (
	"os"
	"strings"
)

// Overwrite is the flag of the commands that read and write files.
type Overwrite struct {
	Inputs bool `name:"overwrite-inputs" help:"Let an output replace a file that is an input of the command."`
}

// File is the path of a file, or a URI, with its flag for errors.
type File struct{ Flag, Path string }

// Check returns an error for an output that is an input, whatever their names are: it follows
// symbolic links, and hard links are one file. Without an Inputs flag such an output would replace
// data that may exist nowhere else. Empty paths and files that do not exist yet are skipped.
func (o Overwrite) Check(inputs, outputs []File) error {
	if o.Inputs {
		return nil
	}
	for _, out := range outputs {
		info, err := os.Stat(out.Path)
		if exists := err == nil && info.Mode().IsRegular(); !exists && !strings.Contains(out.Path, "://") {
			continue
		}
		for _, in := range inputs {
			same := in.Path == out.Path
			if other, e := os.Stat(in.Path); err == nil && e == nil {
				same = os.SameFile(info, other)
			}
			if same {
				return Usagef("%s %s would replace the input %s %s: name another file, or give --overwrite-inputs", out.Flag, out.Path, in.Flag, in.Path)
			}
		}
	}
	return nil
}

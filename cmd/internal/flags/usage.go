package flags

import (
	"errors"
	"fmt"
	"regexp"
	"strings"

	"github.com/seed90331342/attn/kernels"
)

// usage is an error of the command line.
type usage struct{ error }

// Unwrap returns the error itself.
func (u usage) Unwrap() error { return u.error }

// Usagef returns an error of the command line.
func Usagef(format string, args ...any) error { return usage{fmt.Errorf(format, args...)} }

// ofFile is an error of a file that a flag names.
type ofFile struct{ error }

// Unwrap returns the error itself.
func (f ofFile) Unwrap() error { return f.error }

// OfFile marks err as the fault of a file that a flag names: it is not wrong usage.
func OfFile(err error) error {
	if err == nil {
		return nil
	}
	return ofFile{err}
}

// Blame marks the error of a call over files as wrong usage if without, the same call without the values
// that the command line has, returns no error, and otherwise as that of a file.
func Blame(err error, without func() error) error {
	for _, of := range []error{kernels.ErrShape, kernels.ErrDType, kernels.ErrOption, kernels.ErrUnsupported} {
		switch {
		case !errors.Is(err, of):
		case without() == nil:
			return usage{err}
		default:
			return ofFile{err}
		}
	}
	return err
}

// IsUsage reports whether err is wrong usage: one of Usagef, or an option out of its range or
// the name of a backend that does not exist, unless they come from a file.
func IsUsage(err error) bool {
	if _, file := errors.AsType[ofFile](err); file {
		return false
	}
	_, marked := errors.AsType[usage](err)
	return marked || errors.Is(err, kernels.ErrOption) || errors.Is(err, kernels.ErrNoBackend)
}

// kong's errors name Go's types, and the tokens of its scanner.
var (
	noValue  = regexp.MustCompile(`expected \S+ value but got ("EOL" \(<EOL>\)|".*" \(long flag\).*)`)
	reworded = strings.NewReplacer(
		"a valid 64 bit uint", "a whole number of at least 0 and below 2^64",
		"a valid 64 bit int", "a whole number of 64 bits",
		"expected a float", "expected a number",
		"expected duration", "expected a duration such as 90s or 5m",
		`must be one of "",`, "must be one of ",
	)
)

// Reworded returns an error of kong's parser in the words of a user, as wrong usage unless it is that of a file.
func Reworded(err error) error {
	text := fmt.Errorf("%s", reworded.Replace(noValue.ReplaceAllString(err.Error(), "a value is missing")))
	if _, file := errors.AsType[ofFile](err); file {
		return ofFile{text}
	}
	return usage{text}
}

// negative matches values that kong would parse as short flags, alone or in a list: -0.5 and 0.3,-1.
var negative = regexp.MustCompile(`^-[^-]|,-[.\dIi]`)

// JoinNegative joins flags and values with a negative number ("--scale -0.5", "--sinks 0.3,-1"),
// which kong would parse as short flags. The programs have none but -h.
func JoinNegative(args []string) []string {
	var joined []string
	for _, arg := range args {
		last := len(joined) - 1
		if arg != "-h" && negative.MatchString(arg) && !strings.HasPrefix(arg, "--") &&
			last >= 0 && len(joined[last]) > 2 && strings.HasPrefix(joined[last], "--") && !strings.Contains(joined[last], "=") {
			joined[last] += "=" + arg
			continue
		}
		joined = append(joined, arg)
	}
	return joined
}

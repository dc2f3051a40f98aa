package nn

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"strings"

	"github.com/seed90331342/attn/kernels"
	"github.com/seed90331342/attn/kernels/internal/op"
)

// ScalingKind is a kind of [Scaling], named as the rope_type of a config.json.
type ScalingKind string

const (
	ScalingLinear       ScalingKind = "linear"       // Chen et al. 2023, Position Interpolation
	ScalingDynamic      ScalingKind = "dynamic"      // a larger base for longer sequences
	ScalingLlama3       ScalingKind = "llama3"       // Llama 3.1 and later
	ScalingYaRN         ScalingKind = "yarn"         // Peng et al. 2023
	ScalingLongRoPE     ScalingKind = "longrope"     // Ding et al. 2024
	ScalingProportional ScalingKind = "proportional" // Gemma 4
)

const scalingKinds = "linear dynamic llama3 yarn longrope proportional"

// Scaling changes the frequencies of a [RoPE], mostly for sequences that are longer than those
// of the training. Pair i rotates by the angle t·f_i instead of t·θ_i, and the result is
// multiplied by a. With s = Factor and L0 = OriginalMaxPositionEmbeddings:
//
//	linear        f_i = θ_i/s
//	dynamic       f_i = b^(-2i/R)    b = Base·(s·max(Length, L0)/L0 - (s - 1))^(R/(R-2))
//	llama3        f_i = u_i·θ_i + (1-u_i)·θ_i/s
//	              u_i = (L0·θ_i/2π - LowFreqFactor) / (HighFreqFactor - LowFreqFactor), from 0 to 1
//	yarn          f_i = u_i·θ_i + (1-u_i)·θ_i/s    u_i = (hi - i)/(hi - lo), from 0 to 1
//	              lo = max(⌊d(BetaFast)⌋, 0)    hi = min(⌈d(BetaSlow)⌉, R-1)
//	              d(r) = R·ln(L0/(2π·r)) / (2·ln Base)
//	              a = m(MScale)/m(MScaleAllDim) if both are set, else m(1)    m(x) = 1 + 0.1·x·ln s
//	longrope      f_i = θ_i/LongFactor_i if Length > L0, else θ_i/ShortFactor_i
//	              a = sqrt(1 + ln s/ln L0)
//	proportional  f_i = Base^(-2i/D)/s for the first Dim/2 of D/2 pairs, 0 for the others
//
// Where there is no formula, a is 1. A field that its kind does not use must be 0. The zero
// value of a field means the default that its comment gives; others are required. The JSON
// names are those of a config.json, which has truncate in place of no_truncate and no planned_length.
type Scaling struct {
	Kind ScalingKind `json:"rope_type"`
	// Factor is s, at least 1. The default for proportional is 1.
	Factor float64 `json:"factor"`
	// OriginalMaxPositionEmbeddings is L0, the length of the training.
	OriginalMaxPositionEmbeddings int `json:"original_max_position_embeddings"`
	// Length is the planned length of the sequences, for dynamic and longrope; the default is
	// L0. It changes the frequencies of all positions. Keys that a cache has rotated would be
	// wrong after a change, therefore it must not change while a sequence grows.
	Length int `json:"planned_length"`
	// LowFreqFactor and HighFreqFactor are the bounds of llama3, in turns over L0 positions.
	LowFreqFactor  float64 `json:"low_freq_factor"`
	HighFreqFactor float64 `json:"high_freq_factor"`
	// BetaFast and BetaSlow are the bounds of yarn, in turns too; the defaults are 32 and 1.
	BetaFast float64 `json:"beta_fast"`
	BetaSlow float64 `json:"beta_slow"`
	// NoTruncate leaves out the rounding of lo and hi (truncate is false in the config.json).
	NoTruncate bool `json:"no_truncate"`
	// MScale and MScaleAllDim are optional. SoftmaxFactor uses the second one too.
	MScale       float64 `json:"mscale"`
	MScaleAllDim float64 `json:"mscale_all_dim"`
	// AttentionFactor is a of yarn and longrope; the default is the formula.
	AttentionFactor float64 `json:"attention_factor"`
	// ShortFactor and LongFactor have a number for each pair, for longrope.
	ShortFactor []float64 `json:"short_factor"`
	LongFactor  []float64 `json:"long_factor"`
}

// SoftmaxFactor returns the factor by which DeepSeek's models with yarn multiply the scale of the softmax, (1 +
// 0.1·MScaleAllDim·ln s)². Other models do not use it. It is 1 for other kinds and without MScaleAllDim.
func (s *Scaling) SoftmaxFactor() float64 {
	if s == nil || s.Kind != ScalingYaRN || s.Factor <= 1 {
		return 1
	}
	return s.m(s.MScaleAllDim) * s.m(s.MScaleAllDim)
}

func (s *Scaling) m(x float64) float64 { return 1 + 0.1*x*math.Log(s.Factor) }

// attentionFactor returns a.
func (s *Scaling) attentionFactor() float64 {
	switch {
	case s == nil:
		return 1
	case s.AttentionFactor != 0:
		return s.AttentionFactor
	case s.Kind == ScalingYaRN && s.MScale != 0 && s.MScaleAllDim != 0:
		return s.m(s.MScale) / s.m(s.MScaleAllDim)
	case s.Kind == ScalingYaRN:
		return s.m(1)
	case s.Kind == ScalingLongRoPE:
		return math.Sqrt(1 + math.Log(s.Factor)/math.Log(float64(s.OriginalMaxPositionEmbeddings)))
	}
	return 1
}

// check returns s with its defaults, for R/2 pairs.
func (s Scaling) check(base float64, pairs int) (Scaling, error) {
	switch {
	case !slices.Contains(strings.Fields(scalingKinds), string(s.Kind)):
		return s, fmt.Errorf("kind is %q, it must be one of %s: %w", s.Kind, scalingKinds, kernels.ErrOption)
	case s.Kind == ScalingYaRN && base <= 1:
		return s, fmt.Errorf("base is %v, for yarn it must be greater than 1: %w", base, kernels.ErrOption)
	case s.Kind == ScalingDynamic && pairs < 2:
		return s, fmt.Errorf("there is 1 pair, dynamic needs 2 or more: set Dim to 4 or more: %w", kernels.ErrOption)
	case s.Kind == ScalingYaRN:
		s.BetaFast, s.BetaSlow = cmp.Or(s.BetaFast, 32), cmp.Or(s.BetaSlow, 1)
	case s.Kind == ScalingProportional:
		s.Factor = cmp.Or(s.Factor, 1)
	}
	least, n := 0x1p-30, float64(pairs)
	for _, f := range []struct {
		name               string
		value, least, most float64
		required, optional string // kinds
	}{
		{"Factor", s.Factor, 1, op.MaxLength, scalingKinds, ""},
		{"OriginalMaxPositionEmbeddings", float64(s.OriginalMaxPositionEmbeddings), 2, op.MaxLength, "dynamic llama3 yarn longrope", ""},
		{"Length", float64(s.Length), 1, op.MaxLength, "", "dynamic longrope"},
		{"LowFreqFactor", s.LowFreqFactor, least, op.MaxLength, "llama3", ""},
		{"HighFreqFactor", s.HighFreqFactor, s.LowFreqFactor, op.MaxLength, "llama3", ""},
		{"BetaSlow", s.BetaSlow, least, op.MaxLength, "", "yarn"},
		{"BetaFast", s.BetaFast, s.BetaSlow, op.MaxLength, "", "yarn"},
		{"NoTruncate", map[bool]float64{true: 1}[s.NoTruncate], 1, 1, "", "yarn"},
		{"MScale", s.MScale, least, op.MaxLength, "", "yarn"},
		{"MScaleAllDim", s.MScaleAllDim, least, op.MaxLength, "", "yarn"},
		{"AttentionFactor", s.AttentionFactor, least, op.MaxLength, "", "yarn longrope"},
		{"the number of ShortFactor", float64(len(s.ShortFactor)), n, n, "longrope", ""},
		{"the number of LongFactor", float64(len(s.LongFactor)), n, n, "longrope", ""},
	} {
		required := strings.Contains(f.required, string(s.Kind))
		if used := required || strings.Contains(f.optional, string(s.Kind)); !used && f.value != 0 {
			return s, fmt.Errorf("%s is %v, %s does not use it: leave it out: %w", f.name, f.value, s.Kind, kernels.ErrOption)
		}
		if (required || f.value != 0) && !(f.value >= f.least && f.value <= f.most) {
			return s, fmt.Errorf("%s is %v, for %s it must be %v to %v: %w", f.name, f.value, s.Kind, f.least, f.most, kernels.ErrOption)
		}
	}
	for i, f := range slices.Concat(s.ShortFactor, s.LongFactor) {
		if !(f >= least && f <= op.MaxLength) {
			return s, fmt.Errorf("ShortFactor or LongFactor of pair %d is %v, it must be %v to %v: %w", i%pairs, f, least, op.MaxLength, kernels.ErrOption)
		}
	}
	return s, nil
}

// scale replaces each θ, those of R/2 pairs, by f.
func (s Scaling) scale(theta []float64, base float64) error {
	s, err := s.check(base, len(theta))
	if err != nil {
		return fmt.Errorf("scaling: %w", err)
	}
	l0, r := float64(s.OriginalMaxPositionEmbeddings), float64(2*len(theta))
	longer := s.Factor*max(float64(s.Length), l0)/l0 - (s.Factor - 1)
	divisors := s.ShortFactor
	if s.Length > s.OriginalMaxPositionEmbeddings {
		divisors = s.LongFactor
	}
	bound := func(turns float64) float64 { return r * math.Log(l0/(2*math.Pi*turns)) / (2 * math.Log(base)) }
	lo, hi := bound(s.BetaFast), bound(s.BetaSlow)
	if !s.NoTruncate {
		lo, hi = math.Floor(lo), math.Ceil(hi)
	}
	lo, hi = max(lo, 0), min(hi, r-1)
	if lo == hi {
		hi += 0.001 // as the published code has it
	}
	for i, f := range theta {
		u, divisor := 0.0, s.Factor // u is the part of θ that stays
		switch s.Kind {
		case ScalingDynamic:
			divisor = math.Pow(longer, 2*float64(i)/(r-2)) // θ_i/b^(-2i/R), whose b may overflow
		case ScalingLongRoPE:
			divisor = divisors[i]
		case ScalingLlama3:
			u = (l0*f/(2*math.Pi) - s.LowFreqFactor) / max(s.HighFreqFactor-s.LowFreqFactor, 0x1p-30)
		case ScalingYaRN:
			u = (hi - float64(i)) / (hi - lo)
		}
		u = min(max(u, 0), 1)
		theta[i] = u*f + (1-u)*f/divisor
	}
	return nil
}

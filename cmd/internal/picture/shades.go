package picture

import (
	"image/color"
	"math"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/palette/moreland"
)

// blues are shades from almost white to dark blue, ColorBrewer's sequential scheme Blues with
// lightness in equal steps, and last the grey of NaN.
var blues = func() (list color.Palette) {
	colours, err := moreland.NewLuminance([]color.Color{ // from dark to light
		color.NRGBA{0x08, 0x30, 0x6b, 0xff}, color.NRGBA{0x21, 0x71, 0xb5, 0xff}, color.NRGBA{0x6b, 0xae, 0xd6, 0xff},
		color.NRGBA{0xc6, 0xdb, 0xef, 0xff}, color.NRGBA{0xf7, 0xfb, 0xff, 0xff},
	})
	if err != nil {
		panic(err) // they become lighter
	}
	colours.SetMax(254)
	for level := 254; level >= 0; level-- {
		shade, err := colours.At(float64(level))
		if err != nil {
			panic(err) // it is in the range
		}
		list = append(list, shade)
	}
	return append(list, color.Gray{Y: 128})
}()

// scale gives weights from lo to hi shades from light to dark.
type scale struct {
	lo, hi float64
	log    bool // equal ratios of weights are equal steps
}

// logRange is the range of logarithmic shades. The eye sees no difference below a millionth.
const logRange = 1e6

func (h *HeatMap) scale() scale {
	largest := 0.0
	for _, x := range h.Weights.Data {
		largest = max(largest, float64(x)) // NaN stays
	}
	if !(largest > 0) || math.IsInf(largest, 0) { // all 0, or NaN
		largest = 1
	}
	if h.Log {
		return scale{largest / logRange, largest, true}
	}
	return scale{0, largest, false}
}

// share returns the position of a weight on the scale, from 0 to 1.
func (s scale) share(weight float64) float64 {
	if s.log {
		return max(0, 1+math.Log(weight/s.hi)/math.Log(logRange))
	}
	return weight / s.hi
}

// shade returns the index in blues of a weight.
func (s scale) shade(weight float32) uint8 {
	grey := len(blues) - 1
	if share := s.share(float64(weight)); share >= 0 && share <= 1 {
		return uint8(math.Round(share * float64(grey-1)))
	}
	return uint8(grey)
}

// ticks returns the labels of the scale.
func (s scale) ticks() (ticks []plot.Tick) {
	var ticker plot.Ticker = plot.DefaultTicks{}
	if s.log {
		ticker = plot.LogTicks{Prec: 1}
	}
	for _, t := range ticker.Ticks(s.lo, s.hi) {
		if !t.IsMinor() && t.Value >= s.lo && t.Value <= s.hi {
			ticks = append(ticks, t)
		}
	}
	return ticks
}

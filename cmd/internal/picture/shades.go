package picture

import (
	"image/color"

	"gonum.org/v1/plot/palette"
	"gonum.org/v1/plot/palette/moreland"
)

// bluesAnchors are ColorBrewer's sequential scheme Blues, from dark to light.
var bluesAnchors = []color.Color{
	color.NRGBA{0x08, 0x30, 0x6b, 0xff}, color.NRGBA{0x21, 0x71, 0xb5, 0xff}, color.NRGBA{0x6b, 0xae, 0xd6, 0xff}, color.NRGBA{0xc6, 0xdb, 0xef, 0xff}, color.NRGBA{0xf7, 0xfb, 0xff, 0xff},
}

// blues returns a colour map of the levels lo to hi, from almost white to dark blue,
// whose lightness is linear in the level.
func blues(lo, hi float64) palette.ColorMap {
	colours, err := moreland.NewLuminance(bluesAnchors)
	if err != nil {
		panic(err) // the anchors become lighter
	}
	colours.SetMin(lo)
	colours.SetMax(hi)
	return palette.Reverse(colours)
}

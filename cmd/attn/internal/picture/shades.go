package picture

import (
	"fmt"
	"image/color"
	"math"

	"gonum.org/v1/plot/palette"
)

// blues is a colour map from almost white to dark blue, linear between the
// anchors of ColorBrewer's sequential scheme of that name. Larger values are
// always darker.
type blues struct{ min, max, alpha float64 }

var bluesAnchors = [...]color.NRGBA{
	{0xf7, 0xfb, 0xff, 0xff}, {0xc6, 0xdb, 0xef, 0xff}, {0x6b, 0xae, 0xd6, 0xff}, {0x21, 0x71, 0xb5, 0xff}, {0x08, 0x30, 0x6b, 0xff},
}

// At implements palette.ColorMap.
func (b *blues) At(x float64) (color.Color, error) {
	if !(x >= b.min && x <= b.max) {
		return nil, fmt.Errorf("%v is outside the colours' range %v to %v", x, b.min, b.max)
	}
	at := (x - b.min) / (b.max - b.min) * float64(len(bluesAnchors)-1)
	i := min(int(at), len(bluesAnchors)-2)
	lo, hi, f := bluesAnchors[i], bluesAnchors[i+1], at-float64(i)
	mix := func(a, b uint8) uint8 { return uint8(math.Round(float64(a) + f*(float64(b)-float64(a)))) }
	return color.NRGBA{mix(lo.R, hi.R), mix(lo.G, hi.G), mix(lo.B, hi.B), uint8(math.Round(255 * b.alpha))}, nil
}

// The other methods of palette.ColorMap.

func (b *blues) Max() float64       { return b.max }
func (b *blues) SetMax(x float64)   { b.max = x }
func (b *blues) Min() float64       { return b.min }
func (b *blues) SetMin(x float64)   { b.min = x }
func (b *blues) Alpha() float64     { return b.alpha }
func (b *blues) SetAlpha(a float64) { b.alpha = a }

// Palette implements palette.ColorMap.
func (b *blues) Palette(n int) palette.Palette {
	colors := make(colourList, n)
	for i := range colors {
		x := b.min + (b.max-b.min)*float64(i)/float64(max(n-1, 1))
		colors[i], _ = b.At(min(x, b.max)) // within the range
	}
	return colors
}

type colourList []color.Color

// Colors implements palette.Palette.
func (c colourList) Colors() []color.Color { return c }

package pagetest

import (
	"image"
	"image/png"
	"os"
	"testing"
)

// ReadPNG reads a picture.
func ReadPNG(t *testing.T, path string) image.Image {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	img, err := png.Decode(f)
	if err != nil {
		t.Fatal(err)
	}
	return img
}

// WantWhiteBorder checks that no part of a picture is cut off.
func WantWhiteBorder(t *testing.T, img image.Image) {
	t.Helper()
	r := img.Bounds()
	for y := r.Min.Y; y < r.Max.Y; y++ {
		for x := r.Min.X; x < r.Max.X; x++ {
			if x > r.Min.X && x < r.Max.X-1 && y > r.Min.Y && y < r.Max.Y-1 {
				continue
			}
			if r, g, b, _ := img.At(x, y).RGBA(); r != 0xffff || g != 0xffff || b != 0xffff {
				t.Fatalf("something reaches the border at %d,%d", x, y)
			}
		}
	}
}

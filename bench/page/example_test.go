package page_test

import (
	"fmt"
	"log"
	"strings"

	"github.com/seed90331342/attn/bench/page"
)

// Texts from drivers and files are made safe, and a page is one file that loads nothing.
func Example() {
	fmt.Println(page.Line("device lost\nreset failed\x1b[2J"))
	var b strings.Builder
	if err := page.Write(&b, page.Page{Title: "Figures", Body: "<p>none yet</p>"}); err != nil {
		log.Fatal(err)
	}
	fmt.Println(strings.Contains(b.String(), "<h1>Figures</h1>\n<p>none yet</p>"))
	// Output:
	// device lost; reset failed�[2J
	// true
}

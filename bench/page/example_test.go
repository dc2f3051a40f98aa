package page_test

import (
	"fmt"
	"log"
	"strings"

	"github.com/seed90331342/attn/bench/page"
)

// A page is one file that loads nothing.
func Example() {
	var b strings.Builder
	if err := page.Write(&b, page.Page{Title: "Figures", Body: "<p>none yet</p>"}); err != nil {
		log.Fatal(err)
	}
	fmt.Println(strings.Contains(b.String(), "<h1>Figures</h1>\n<p>none yet</p>"))
	// Output:
	// true
}

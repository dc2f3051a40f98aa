package main

import (
	"fmt"
	"os"
	"path/filepath"

	"github.com/seed90331342/attn/bench"
)

func main() {
	for _, pat := range os.Args[1:] {
		files, _ := filepath.Glob(pat)
		var rs []*bench.Report
		for _, f := range files {
			if r, err := bench.ReadFile(f); err == nil && len(r.Cases) > 0 {
				rs = append(rs, r)
			}
		}
		for _, factor := range []float64{1, 1.1} {
			n := map[string]map[bench.Verdict]int{}
			run := map[string]int{}
			for i := range rs {
				for j := range rs {
					if i == j {
						continue
					}
					b := *rs[j]
					b.Cases = append([]bench.Measurement(nil), b.Cases...)
					for k := range b.Cases {
						c := &b.Cases[k]
						c.Rounds = append([]bench.Round(nil), c.Rounds...)
						for x := range c.Rounds {
							t := append([]float64(nil), c.Rounds[x].TimesS...)
							for y := range t {
								t[y] *= factor
							}
							c.Rounds[x].TimesS = t
						}
					}
					slower, faster := false, false
					for _, ch := range bench.Difference(rs[i], &b, 4) {
						if ch.New == nil {
							continue
						}
						if n[ch.New.Name] == nil {
							n[ch.New.Name] = map[bench.Verdict]int{}
						}
						n[ch.New.Name][ch.Verdict]++
						slower = slower || ch.Verdict == bench.Slower
						faster = faster || ch.Verdict == bench.Faster
					}
					switch {
					case slower && faster:
						run["both"]++
					case slower:
						run["slower"]++
					case faster:
						run["faster"]++
					default:
						run["none"]++
					}
				}
			}
			fmt.Println(pat, len(rs), "runs, factor", factor, run)
			for k, v := range n {
				fmt.Println("   ", k, v)
			}
		}
	}
}

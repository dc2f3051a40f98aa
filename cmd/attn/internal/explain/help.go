package explain

import (
	_ "embed"
	"strings"
)

// example is a file with every kind of expected value, for the help.
//
//go:embed example.json
var example string

// Help is the part of attn explain --help on the fields of FILE. kong reads lines with spaces before them as they are.
func (*Command) Help() string {
	return `Fields of the example, each optional but x, with S tokens and an axis [B] before the others where x has one:

    x                        [S,M]     the tokens
    w_query, w_key, w_value  [M,D]     the projections; without one, x itself
    b_query, b_key, b_value  [D]       their biases
    scale                              of the scores, by default 1/sqrt(D)
    softcap                            bounds scores to (-softcap, softcap)
    title, labels                      of the text and the picture, a label for each token
    d_outputs                [S,D]     the gradient of the outputs, for --gradients

Expected values, which are checked against float64:

    queries, keys, values    [S,D]
    scores, softmax          [S,S]     a row for each query; the scores are scaled
    outputs_exact            [S,D]     to the last digit of a float64
    digits                             decimals of the others; by default 7 significant digits

and with --round N, where softmax_rounded has N decimals:

    softmax_rounded          [S,S]     weights that add up to 1
    weighted_values_rounded  [S,S,D]   weight times value: [key][query][column]
    outputs_rounded          [S,D]

A file with all of them, for attn explain --round 1:

` + indent(example)
}

// indent puts four spaces before each line.
func indent(text string) string {
	return "    " + strings.ReplaceAll(strings.TrimSpace(text), "\n", "\n    ")
}

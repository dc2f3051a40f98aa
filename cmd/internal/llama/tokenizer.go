package llama

import (
	"encoding/binary"
	"math"
	"math/rand/v2"
	"strings"
)

// Tokens with a meaning. The 256 bytes follow.
const Beginning, Ending, firstByte = 1, 2, 3

// Tokenizer splits texts into the tokens of a byte pair encoding (Sennrich et al. 2016).
type Tokenizer struct {
	pieces []string
	scores []float32 // pairs with the highest are merged first
	ids    map[string]int
}

// LoadTokenizer reads a file like TokenizerFile, a tokenizer of llama2.c: the length of the longest piece, then a
// score, a length and the bytes of each piece.
func LoadTokenizer(data []byte) *Tokenizer {
	t := &Tokenizer{ids: map[string]int{}}
	for at := 4; at < len(data); {
		score, n := binary.LittleEndian.Uint32(data[at:]), int(binary.LittleEndian.Uint32(data[at+4:]))
		piece := string(data[at+8 : at+8+n])
		t.ids[piece] = len(t.pieces)
		t.pieces, t.scores = append(t.pieces, piece), append(t.scores, math.Float32frombits(score))
		at += 8 + n
	}
	return t
}

// Encode returns the tokens of text after the token Beginning. Text begins with a space, as in training.
func (t *Tokenizer) Encode(text string) []int {
	tokens := []int{Beginning}
	if text != "" {
		text = " " + strings.ToValidUTF8(text, "\uFFFD")
	}
	for _, r := range text {
		if id, ok := t.ids[string(r)]; ok {
			tokens = append(tokens, id)
			continue
		}
		for _, b := range []byte(string(r)) {
			tokens = append(tokens, firstByte+int(b))
		}
	}
	for {
		best, at := -1, 0
		for i := 1; i+1 < len(tokens); i++ {
			if id, ok := t.ids[t.pieces[tokens[i]]+t.pieces[tokens[i+1]]]; ok && (best < 0 || t.scores[id] > t.scores[best]) {
				best, at = id, i
			}
		}
		if best < 0 {
			return tokens
		}
		tokens = append(append(tokens[:at:at], best), tokens[at+2:]...)
	}
}

// Texts returns the text of each token but the first, which the others continue.
func (t *Tokenizer) Texts(tokens []int) (list []string) {
	for i, token := range tokens[1:] {
		piece := t.pieces[token]
		if b := token - firstByte; b >= 0 && b < 256 {
			if piece = string([]byte{byte(b)}); b < ' ' && b != '\n' && b != '\t' || b == 0x7f {
				piece = "\uFFFD" // control characters are not for terminals
			}
		} else if tokens[i] == Beginning {
			piece = strings.TrimPrefix(piece, " ")
		}
		list = append(list, piece)
	}
	return list
}

// Decode returns the text of tokens without the first one.
func (t *Tokenizer) Decode(tokens []int) string { return strings.Join(t.Texts(tokens), "") }

// Sample draws a token from softmax(logits/temperature): the largest logit after Gumbel
// noise times the temperature is added (Gumbel 1954). At 0 it is the most probable token.
func Sample(logits []float32, temperature float64, rng *rand.Rand) (token int) {
	best := math.Inf(-1)
	for i, x := range logits {
		if y := float64(x) - temperature*math.Log(rng.ExpFloat64()); y > best {
			best, token = y, i
		}
	}
	return token
}

package npy

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
)

// parsePyDict reads the Python literals that a .npy header holds: a dict from
// strings to strings, bools, tuples of integers, and lists (which come back as
// nil: records, which nobody here reads).
func parsePyDict(text string) (map[string]any, error) {
	p := pyParser{rest: text}
	if !p.take('{') {
		return nil, errors.New("it is not a dict")
	}
	d := map[string]any{}
	for !p.take('}') {
		key, err := p.value()
		if err != nil {
			return nil, err
		}
		name, ok := key.(string)
		if !ok || !p.take(':') {
			return nil, errors.New("it is not a dict of strings")
		}
		if d[name], err = p.value(); err != nil {
			return nil, err
		}
		if !p.take(',') && !p.peek('}') {
			return nil, errors.New("the dict does not end")
		}
	}
	if strings.TrimSpace(p.rest) != "" {
		return nil, errors.New("something follows the dict")
	}
	return d, nil
}

type pyParser struct{ rest string }

func (p *pyParser) skipSpace() { p.rest = strings.TrimLeft(p.rest, " \t\r\n") }

func (p *pyParser) peek(c byte) bool {
	p.skipSpace()
	return p.rest != "" && p.rest[0] == c
}

func (p *pyParser) take(c byte) bool {
	ok := p.peek(c)
	if ok {
		p.rest = p.rest[1:]
	}
	return ok
}

func (p *pyParser) value() (any, error) {
	switch {
	case p.take('\''):
		return p.until('\'')
	case p.take('"'):
		return p.until('"')
	case p.peek('['):
		// Records: find the end of the list, whatever is in it.
		depth := 0
		for i, c := range p.rest {
			switch c {
			case '[':
				depth++
			case ']':
				depth--
			}
			if depth == 0 {
				p.rest = p.rest[i+1:]
				return nil, nil
			}
		}
		return nil, errors.New("a list does not end")
	case p.take('('):
		shape := []int{}
		for !p.take(')') {
			word := p.word()
			l, err := strconv.Atoi(strings.TrimSuffix(word, "L")) // Python 2 wrote 3L
			if err != nil {
				return nil, fmt.Errorf("%q in a tuple is not a whole number", word)
			}
			shape = append(shape, l)
			if !p.take(',') && !p.peek(')') {
				return nil, errors.New("a tuple does not end")
			}
		}
		return shape, nil
	}
	switch word := p.word(); word {
	case "True":
		return true, nil
	case "False":
		return false, nil
	default:
		return nil, fmt.Errorf("%q is not understood", word)
	}
}

func (p *pyParser) until(quote byte) (string, error) {
	s, rest, ok := strings.Cut(p.rest, string(quote))
	if !ok {
		return "", errors.New("a string does not end")
	}
	p.rest = rest
	return s, nil
}

// word takes what comes before the next separator.
func (p *pyParser) word() string {
	p.skipSpace()
	end := strings.IndexAny(p.rest, " \t\r\n,:(){}[]'\"")
	if end < 0 {
		end = len(p.rest)
	}
	w := p.rest[:end]
	p.rest = p.rest[end:]
	return w
}

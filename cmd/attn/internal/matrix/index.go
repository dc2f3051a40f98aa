package matrix

import "fmt"

// Index returns the position of element i of an array of the given shape: [1][0][2].
func Index(shape []int, i int) string {
	text := ""
	for axis := len(shape) - 1; axis >= 0; axis-- {
		text = fmt.Sprintf("[%d]%s", i%shape[axis], text)
		i /= shape[axis]
	}
	return text
}

// Package tables writes the tables of package vec that list its kernels. It reads the fields
// and the parameters from vec.go, so that the generators do not repeat them.
package tables

import (
	"cmp"
	"fmt"
	"go/ast"
	"go/format"
	"go/parser"
	"go/token"
	"go/types"
	"log"
	"os"
	"slices"
	"strings"
)

// declared are the types that vec.go declares.
var declared = func() map[string]ast.Expr {
	found := map[string]ast.Expr{}
	file, err := parser.ParseFile(token.NewFileSet(), "../vec.go", nil, parser.SkipObjectResolution)
	if err != nil {
		log.Fatal(err)
	}
	ast.Inspect(file, func(n ast.Node) bool {
		if t, ok := n.(*ast.TypeSpec); ok {
			found[t.Name.Name] = t.Type
		}
		return true
	})
	return found
}()

// The offsets of the fields of Draw. Vectors of 64 bit numbers have the width of the
// widest instruction set; the others read their first part.
const (
	DrawRounds    = 0                   // [20]: two keys for each round
	DrawCounters  = DrawRounds + 64*20  // [3]: first words of counters
	DrawKeys      = DrawCounters + 64*3 // [3]: second words less the base
	DrawBase      = DrawKeys + 64*3     // the base of second words
	DrawStep      = DrawBase + 64       // increment of the base
	DrawHeads     = DrawStep + 64       // [3]: third words
	DrawBatch     = DrawHeads + 64*3    // fourth words
	DrawThreshold = DrawBatch + 64      // 32 bit numbers
	DrawFactor    = DrawThreshold + 64  // float32
	DrawM0        = DrawFactor + 64     // the two multipliers
	DrawM1        = DrawM0 + 64
	DrawFixed     = DrawM1 + 64 // [3][5]: written by the assembly
)

// Which states which of a field's kernels one is, where the field has several.
type Which struct {
	Element       string // of keys or values: "" for F32, "F16", "BF16", "Q8", "Q4", "F8"
	Rows, Vectors int    // of its register tile, or 0
}

// kernel is an entry of a field.
type kernel struct {
	Which
	function string
}

// kernels are those of each table and field, in the order in which they were written.
var kernels = map[string]map[string][]kernel{}

// Kernel enters a kernel into a field of a table. Its function is named after the field and ends
// with suffix. Kernel returns its name, a comment, and its parameters and results, for example
// "x *float32, vectors int, m float32".
func Kernel(table, field, suffix string, which Which) (name, doc, params, results string) {
	for _, of := range []string{"Kernels", "tileKernels"} {
		for _, f := range declared[of].(*ast.StructType).Fields.List {
			for _, n := range f.Names {
				if n.Name != field {
					continue
				}
				name, doc = field+which.Element, of+"."+field
				if array, ok := f.Type.(*ast.ArrayType); ok && array.Len != nil {
					doc += "[" + which.element() + "]"
				}
				if which.Rows > 0 {
					name, doc = fmt.Sprint(name, which.Rows), fmt.Sprintf("%s for %d rows", doc, which.Rows)
				}
				if which.Vectors > 0 {
					name, doc = fmt.Sprintf("%sx%d", name, which.Vectors), fmt.Sprintf("%s and %d vectors", doc, which.Vectors)
				}
				name += suffix
				if kernels[table] == nil {
					kernels[table] = map[string][]kernel{}
				}
				kernels[table][field] = append(kernels[table][field], kernel{which, name})
				fn := function(f.Type)
				return name, name + " is " + doc + ".", list(fn.Params), list(fn.Results)
			}
		}
	}
	log.Fatalf("no table of package vec has a field %s", field)
	return "", "", "", ""
}

// MixTiles returns the numbers of heads and vectors of the register tiles of Mix for elements of so many
// bytes: for four heads, four vectors at most. Two heads are the key and the query of linear attention.
func MixTiles(bytes, four int) (tiles [][2]int) {
	tiles = [][2]int{{8, 2}, {8, 1}, {4, four}, {4, 1}}
	if bytes == 4 {
		tiles = append(tiles, [][2]int{{2, 4}, {2, 1}}...)
	}
	return append(tiles, [][2]int{{1, 8}, {1, 4}, {1, 1}}...)
}

// Share enters the kernels of a field into another table as well.
func Share(field, from, to string) { kernels[to][field] = kernels[from][field] }

func (w Which) element() string { return cmp.Or(w.Element, "F32") }

// function returns the type of the functions in a field of type t.
func function(t ast.Expr) *ast.FuncType {
	for {
		switch x := t.(type) {
		case *ast.FuncType:
			return x
		case *ast.ArrayType:
			t = x.Elt
		case *ast.IndexExpr: // registerTile[t]
			t = x.Index
		case *ast.Ident:
			t = declared[x.Name]
		default:
			log.Fatalf("%T is not the type of kernels", t)
		}
	}
}

// list returns "a, b int, c float32".
func list(fields *ast.FieldList) string {
	if fields == nil {
		return ""
	}
	var all []string
	for _, f := range fields.List {
		var names []string
		for _, n := range f.Names {
			names = append(names, n.Name)
		}
		all = append(all, strings.Join(names, ", ")+" "+types.ExprString(f.Type))
	}
	return strings.Join(all, ", ")
}

// Table is the head of a table, which is the variable "kernels"+Name.
type Table struct {
	Name, Tier             string
	Lanes, Width, RowLanes int
	// Like names the table that a narrow table is a copy of but for the kernels of its own. It is ""
	// for the widest table of a tier. A narrow table is a function "narrow"+Name.
	Like string
}

// Write writes tables to file.
func Write(file string, tables ...Table) {
	var b strings.Builder
	b.WriteString("// Code generated by package _generate/tables from the kernels that are generated. DO NOT EDIT.\n\npackage vec\n")
	for _, t := range tables {
		if t.Like == "" {
			fmt.Fprintf(&b, "\nvar kernels%s = Kernels{\nTier: %q, Lanes: %d, Width: %d,\ntile: tileKernels{\n", t.Name, t.Tier, t.Lanes, t.Width)
			t.fields(&b, "tileKernels", "%s: %s,\n")
			b.WriteString("},\n")
			t.fields(&b, "Kernels", "%s: %s,\n")
			b.WriteString("}\n")
			continue
		}
		fmt.Fprintf(&b, "\n// narrow%s returns x, a copy of kernels%s, with kernels for tiles of %d query rows.\n", t.Name, t.Like, t.Width)
		fmt.Fprintf(&b, "func narrow%s(x Kernels) *Kernels {\nx.Tier, x.Width, x.narrow = %q, %d, nil\n", t.Name, t.Tier, t.Width)
		if t.RowLanes > 0 {
			fmt.Fprintf(&b, "x.rowLanes = %d\n", t.RowLanes)
		}
		b.WriteString("x.tile = tileKernels{\n")
		t.fields(&b, "tileKernels", "%s: %s,\n")
		b.WriteString("}\n")
		t.fields(&b, "Kernels", "x.%s = %s\n")
		b.WriteString("return &x\n}\n")
	}
	text, err := format.Source([]byte(b.String()))
	if err == nil {
		err = os.WriteFile(file, text, 0o644)
	}
	if err != nil {
		log.Fatal(err)
	}
}

// fields writes the fields of a type for which t has kernels.
func (t Table) fields(b *strings.Builder, of, line string) {
	for _, f := range declared[of].(*ast.StructType).Fields.List {
		for _, n := range f.Names {
			all := kernels[t.Name][n.Name]
			if all == nil {
				continue
			}
			kind := ""
			if _, ok := f.Type.(*ast.ArrayType); ok {
				kind = types.ExprString(f.Type)
			}
			fmt.Fprintf(b, line, n.Name, kind+value(f.Type, all))
		}
	}
}

// value returns the value of a field of type t, without its type.
func value(t ast.Expr, all []kernel) string {
	x, ok := t.(*ast.ArrayType)
	switch {
	case !ok:
		return all[0].function
	case x.Len == nil: // of registerTile
		all = slices.Clone(all)
		slices.SortFunc(all, func(x, y kernel) int {
			return cmp.Or(cmp.Compare(y.Rows, x.Rows), cmp.Compare(y.Vectors, x.Vectors))
		})
		var list []string
		for _, k := range all {
			list = append(list, fmt.Sprintf("{%d, %d, %s}", k.Rows, k.Vectors, k.function))
		}
		return "{" + strings.Join(list, ", ") + "}"
	}
	var s strings.Builder
	for len(all) > 0 {
		same := func(k kernel) bool { return k.Element == all[0].Element }
		n := len(all)
		if i := slices.IndexFunc(all, func(k kernel) bool { return !same(k) }); i >= 0 {
			n = i
		}
		fmt.Fprintf(&s, "%s: %s,\n", all[0].element(), value(x.Elt, all[:n]))
		all = all[n:]
	}
	return "{\n" + s.String() + "}"
}

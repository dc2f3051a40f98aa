// Package tables reads the parameters of kernels from the tables of package vec, so that the
// generators do not repeat them.
package tables

import (
	"go/ast"
	"go/parser"
	"go/token"
	"go/types"
	"log"
	"strings"
)

// declared are the types that the files with tables declare.
var declared = func() map[string]ast.Expr {
	found := map[string]ast.Expr{}
	for _, name := range []string{"../vec.go", "../pairs.go"} {
		file, err := parser.ParseFile(token.NewFileSet(), name, nil, parser.SkipObjectResolution)
		if err != nil {
			log.Fatal(err)
		}
		ast.Inspect(file, func(n ast.Node) bool {
			if t, ok := n.(*ast.TypeSpec); ok {
				found[t.Name.Name] = t.Type
			}
			return true
		})
	}
	return found
}()

// Kernel returns the field with the given name of a table, "Kernels.exp2" for example, and the
// parameters and results of its functions, "x *float32, vectors int, m float32".
func Kernel(name string) (field, params, results string) {
	for _, table := range []string{"Kernels", "tileKernels", "registerTile", "pairKernels", "pairTile"} {
		for _, f := range declared[table].(*ast.StructType).Fields.List {
			for _, n := range f.Names {
				if n.Name == name {
					fn := function(f.Type)
					return table + "." + name, list(fn.Params), list(fn.Results)
				}
			}
		}
	}
	log.Fatalf("no table of package vec has a field %s", name)
	return "", "", ""
}

// function returns the type of the functions in a field of type t.
func function(t ast.Expr) *ast.FuncType {
	for {
		switch x := t.(type) {
		case *ast.FuncType:
			return x
		case *ast.ArrayType:
			t = x.Elt
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

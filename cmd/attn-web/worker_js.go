//go:build js

package main

import (
	"context"
	"encoding/json"
	"sync"
	"syscall/js"

	"github.com/seed90331342/attn/cmd/attn-web/internal/measure"
	_ "github.com/seed90331342/attn/cpu"
	_ "github.com/seed90331342/attn/gpu"
)

// message is a command of the page: "start" with a request, or "stop".
type message struct {
	Type    string          `json:"type"`
	Request measure.Request `json:"request"`
}

// main is the program of the page's worker. Its messages are JSON texts in both directions.
func main() {
	self := js.Global()
	send := func(e measure.Event) {
		text, err := json.Marshal(e)
		if err != nil { // figures are finite
			panic(err)
		}
		self.Call("postMessage", string(text))
	}
	received := make(chan message, 8)
	self.Set("onmessage", js.FuncOf(func(_ js.Value, args []js.Value) any {
		var m message
		if json.Unmarshal([]byte(args[0].Get("data").String()), &m) == nil {
			received <- m // of a page that sends one command after the answer to another
		}
		return nil
	}))
	send(measure.Devices())
	var running sync.WaitGroup
	stop := func() {}
	for m := range received {
		stop()
		running.Wait()
		if m.Type != "start" {
			continue
		}
		var ctx context.Context
		ctx, stop = context.WithCancel(context.Background())
		running.Go(func() { measure.Run(ctx, m.Request, send) })
	}
}

//go:build js

package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"sync"
	"syscall/js"
	"time"

	"github.com/seed90331342/attn/cmd/attn-web/internal/measure"
	"github.com/seed90331342/attn/cmd/attn-web/internal/story"
	_ "github.com/seed90331342/attn/cpu"
	_ "github.com/seed90331342/attn/gpu"
	"github.com/seed90331342/attn/kernels"
)

// message is a command of the page: "start" with a request, "turn" to go on with it, "write" with a
// story, "weights" with a token of that story, or "stop".
type message struct {
	Type    string          `json:"type"`
	Request measure.Request `json:"request"`
	// Turns makes a request wait for "turn" after each step that it reports.
	Turns bool          `json:"turns"`
	Story story.Request `json:"story"`
	Token int           `json:"token"`
}

// main is the program of the page's worker. Its messages are JSON texts in both directions.
func main() {
	received := make(chan message, 8)
	js.Global().Set("onmessage", js.FuncOf(func(_ js.Value, args []js.Value) any {
		var m message
		if json.Unmarshal([]byte(args[0].Get("data").String()), &m) == nil {
			received <- m // of a page that sends one command after the answer to another
		}
		return nil
	}))
	send(measure.Devices())
	var running sync.WaitGroup
	var last writer
	stop := func() {}
	turns := make(chan struct{})
	for m := range received {
		if m.Type == "turn" {
			select {
			case turns <- struct{}{}:
			default: // of a run that was stopped
			}
			continue
		}
		stop()
		running.Wait()
		var ctx context.Context
		ctx, stop = context.WithCancel(context.Background())
		switch m.Type {
		case "start":
			running.Go(func() {
				measure.Run(ctx, m.Request, func(e measure.Event) {
					send(e)
					if m.Turns && e.Type == "progress" {
						select {
						case <-turns:
						case <-ctx.Done():
						}
					}
				})
			})
		case "write":
			running.Go(func() { ended("wrote", last.write(ctx, m.Story)) })
		case "weights":
			running.Go(func() { last.weights(ctx, m.Token) })
		}
	}
}

// send sends an event to the page.
func send[E any](e E) {
	text, err := json.Marshal(e)
	if err != nil { // JSON has no NaN, which a defective device may compute
		text, _ = json.Marshal(told{Type: "wrote", Text: "The device computes what is no number: " + err.Error() + "."})
	}
	js.Global().Call("postMessage", string(text))
}

// told is an event of a story: the texts of new tokens ("tokens") with their rate, the weights of a
// token ("weights"), or the end ("wrote") with a sentence about what failed.
type told struct {
	Type    string        `json:"type"`
	Texts   []string      `json:"texts,omitempty"`
	Rate    float64       `json:"rate,omitempty"`
	Token   int           `json:"token"`
	Weights [][][]float32 `json:"weights,omitempty"`
	Text    string        `json:"text,omitempty"`
}

// ended sends an event with an error, which is nil or of a stopped run where nothing failed.
func ended(event string, err error) {
	e := told{Type: event}
	if err != nil && !errors.Is(err, context.Canceled) {
		e.Text = "The story failed: " + err.Error() + "."
	}
	send(e)
}

// writer keeps the model of the last story on its device.
type writer struct {
	*story.Writer
	dev *kernels.Device
}

func (w *writer) write(ctx context.Context, req story.Request) error {
	if w.Writer == nil || w.dev.Info().Name != req.Device {
		if w.Writer != nil {
			w.dev.Close()
			w.Writer = nil
		}
		checkpoint, err := load("checkpoint.bin")
		if err != nil {
			return err
		}
		tokenizer, err := load("tokenizer.bin")
		if err != nil {
			return err
		}
		if w.dev, err = kernels.Open(req.Device); err != nil {
			return err
		}
		if w.Writer, err = story.New(ctx, w.dev, checkpoint, tokenizer); err != nil {
			w.dev.Close()
			return err
		}
	}
	return w.Write(ctx, req, func(texts []string, rate float64) {
		send(told{Type: "tokens", Texts: texts, Rate: rate})
		time.Sleep(time.Microsecond) // the messages of the page arrive while every goroutine sleeps
	})
}

func (w *writer) weights(ctx context.Context, token int) {
	if w.Writer == nil {
		return
	}
	weights, err := w.Weights(ctx, token)
	if err != nil {
		ended("wrote", err)
		return
	}
	send(told{Type: "weights", Token: token, Weights: weights})
}

// load fetches a file that lies beside the page. It calls the function load of worker.js.
func load(name string) (data []byte, err error) {
	done := make(chan error)
	settled := js.FuncOf(func(_ js.Value, args []js.Value) any {
		if problem := args[1]; problem.Truthy() {
			err = fmt.Errorf("%s does not load: %s", name, problem.String())
		} else {
			data = make([]byte, args[0].Length())
			js.CopyBytesToGo(data, args[0])
		}
		close(done)
		return nil
	})
	defer settled.Release()
	js.Global().Call("load", name, settled)
	<-done
	return data, err
}

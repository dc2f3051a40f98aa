package gpu_test

import (
	"syscall/js"
	"testing"

	"github.com/seed90331342/attn/gpu"
	"github.com/seed90331342/attn/kernels"
)

// BenchmarkTinyCall is a call and the read of its result, next to what WebGPU alone takes for it:
//
//	GOOS=js GOARCH=wasm go test -exec "node shaders/testdata/tint/run.mjs" -run '^$' -bench TinyCall ./gpu
func BenchmarkTinyCall(b *testing.B) {
	b.Run("attn", func(b *testing.B) {
		be, err := gpu.Open("", gpu.Options{})
		if err != nil {
			b.Skipf("needs a WebGPU adapter: %v", err)
		}
		dev := kernels.NewDevice(be)
		defer dev.Close()
		ctx, shape := b.Context(), kernels.Shape{1, 1, 1, 4}
		x, err := dev.FromFloat32(ctx, kernels.F32, make([]float32, 4), shape)
		check(b, err)
		y, err := dev.Alloc(ctx, kernels.F32, shape)
		check(b, err)
		host, err := kernels.AllocHost(kernels.F32, shape)
		check(b, err)
		for b.Loop() {
			check(b, dev.Copy(ctx, []kernels.Tensor{y}, []kernels.Tensor{x}))
			check(b, dev.Download(ctx, host, y))
		}
	})
	b.Run("WebGPU", func(b *testing.B) {
		// In JavaScript alone: a submission, its end, the map of a buffer.
		run := js.Global().Get("Function").New("rounds", `return (async () => {
			const adapter = await navigator.gpu.requestAdapter();
			const device = await adapter.requestDevice();
			const from = device.createBuffer({ size: 16, usage: GPUBufferUsage.COPY_SRC | GPUBufferUsage.COPY_DST });
			const to = device.createBuffer({ size: 16, usage: GPUBufferUsage.COPY_DST | GPUBufferUsage.MAP_READ });
			const start = performance.now();
			for (let i = 0; i < rounds; i++) {
				const encoder = device.createCommandEncoder();
				encoder.copyBufferToBuffer(from, 0, to, 0, 16);
				device.queue.submit([encoder.finish()]);
				await device.queue.onSubmittedWorkDone();
				await to.mapAsync(GPUMapMode.READ);
				to.getMappedRange();
				to.unmap();
			}
			return (performance.now() - start) / rounds;
		})()`)
		took := make(chan float64)
		done := js.FuncOf(func(_ js.Value, args []js.Value) any {
			go func() { took <- args[0].Float() }()
			return nil
		})
		defer done.Release()
		run.Invoke(b.N).Call("then", done)
		b.ReportMetric(1e6*<-took, "ns/op")
	})
}

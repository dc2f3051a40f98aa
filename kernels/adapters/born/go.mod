module github.com/seed90331342/attn/kernels/adapters/born

go 1.26.0

require (
	github.com/born-ml/born v0.9.23
	github.com/seed90331342/attn v0.0.0
)

require (
	github.com/dlclark/regexp2 v1.12.0 // indirect
	github.com/go-webgpu/goffi v0.6.3 // indirect
	github.com/go-webgpu/webgpu v0.5.5 // indirect
	github.com/gogpu/gpucontext v0.31.3 // indirect
	github.com/gogpu/gputypes v0.8.0 // indirect
	github.com/gogpu/naga v0.19.0 // indirect
	github.com/gogpu/wgpu v0.34.5 // indirect
	github.com/google/uuid v1.6.0 // indirect
	github.com/pkoukk/tiktoken-go v0.1.8 // indirect
	github.com/rajveermalviya/go-webgpu/wgpu v0.17.1 // indirect
	github.com/x448/float16 v0.8.4 // indirect
	golang.org/x/sys v0.49.0 // indirect
	gonum.org/v1/gonum v0.17.0 // indirect
)

replace github.com/seed90331342/attn => ../../..

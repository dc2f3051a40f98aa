module github.com/seed90331342/attn/cmd/attn-onnx

go 1.26.0

require (
	github.com/google/go-cmp v0.7.0
	github.com/seed90331342/attn v0.0.0
	github.com/tidwall/jsonc v0.3.3
	github.com/x448/float16 v0.8.4
	google.golang.org/protobuf v1.36.12
)

require (
	github.com/alecthomas/kong v1.17.0 // indirect
	github.com/go-webgpu/goffi v0.6.3 // indirect
	github.com/go-webgpu/webgpu v0.5.5 // indirect
	github.com/gogpu/gpucontext v0.31.3 // indirect
	github.com/gogpu/gputypes v0.8.0 // indirect
	github.com/gogpu/naga v0.19.0 // indirect
	github.com/gogpu/wgpu v0.34.5 // indirect
	github.com/rajveermalviya/go-webgpu/wgpu v0.17.1 // indirect
	github.com/sbinet/npyio v0.6.0 // indirect
	golang.org/x/sys v0.49.0 // indirect
	golang.org/x/term v0.46.0 // indirect
	gonum.org/v1/gonum v0.17.0 // indirect
)

replace github.com/seed90331342/attn => ../..

module github.com/seed90331342/attn/kernels/adapters/gomlx

go 1.26.5

require (
	github.com/gomlx/compute v0.1.5
	github.com/gomlx/gomlx v0.28.5
	github.com/gomlx/onnx-gomlx v0.5.2
	github.com/seed90331342/attn v0.0.0
	google.golang.org/protobuf v1.36.11
)

require (
	github.com/go-logr/logr v1.4.3 // indirect
	github.com/go-webgpu/goffi v0.6.3 // indirect
	github.com/go-webgpu/webgpu v0.5.5 // indirect
	github.com/gogpu/gpucontext v0.31.3 // indirect
	github.com/gogpu/gputypes v0.8.0 // indirect
	github.com/gogpu/naga v0.19.0 // indirect
	github.com/gogpu/wgpu v0.34.5 // indirect
	github.com/gomlx/exceptions v0.0.3 // indirect
	github.com/google/go-cmp v0.7.0 // indirect
	github.com/google/uuid v1.6.0 // indirect
	github.com/pkg/errors v0.9.1 // indirect
	github.com/rajveermalviya/go-webgpu/wgpu v0.17.1 // indirect
	github.com/x448/float16 v0.8.4 // indirect
	golang.org/x/exp v0.0.0-20260410095643-746e56fc9e2f // indirect
	golang.org/x/sys v0.49.0 // indirect
	gonum.org/v1/gonum v0.17.0 // indirect
	k8s.io/klog/v2 v2.140.0 // indirect
)

replace github.com/seed90331342/attn => ../../..

# make quick       what has changed since main, on the CPU alone, in at most a minute
# make test        what must hold before a commit: formatting, vet, staticcheck, actionlint, the suite once
# make test-all    what repeats it: every kernel variant, the second provider, races, arm64, fuzzing
# make test-beam   the module cmd/attn-beam: attention on Apache Beam, with worker processes
# make test-onnx   the module cmd/attn-onnx: published cases of ONNX and ONNX Runtime
# make test-adapters   the modules below kernels/adapters: attention of programs in born and gomlx
# make test-web    WebGPU as browsers have it: the backend as wasm in Node, and the page of cmd/attn-web
# make test-matrix   Dawn opened at run time, with matrix units, in an unpacked Debian below .cache
# make test-peers  results next to those of PyTorch, unpacked from Debian below .cache
# make fuzz        each fuzz target for DURATION (10m)
# make soak        all kinds of work in 16 goroutines for DURATION (10m): results and memory stay the same
# make bench       the main job: attention on every backend, with its ceiling in the same run
# make house       lines, files and exported names of each part with their ceilings, and the way of a call
# make build       one binary, ./attn
# make release-snapshot  what a release of the last commit contains, in .cache/release
# make update      refresh golden files and generated code

.PHONY: quick test test-all test-beam test-onnx test-adapters test-web test-matrix test-peers fuzz soak bench house build release-snapshot update

quick:
	@sh .ci/quick

test:
	@sh .ci/test

test-all:
	@sh .ci/test-all

test-beam:
	@sh .ci/test-beam

test-onnx:
	@sh .ci/test-onnx

test-adapters:
	@sh .ci/test-adapters

test-web:
	@sh .ci/test-web

test-matrix:
	@sh .ci/test-matrix

test-peers:
	@sh .ci/test-peers

fuzz:
	@DURATION=$(or $(DURATION),10m) sh .ci/fuzz

soak:
	ATTN_SOAK=$(or $(DURATION),10m) go test -v -count=1 -timeout 0 ./bench/internal/soak

bench:
	go run ./cmd/attn bench

house:
	@go run ./.ci/house

build:
	go build -o attn ./cmd/attn

release-snapshot:
	@sh .ci/release-snapshot

update:
	go generate ./...
	go test ./kernels -run TestAPI -update
	go test ./cmd/attn/internal/explain ./cmd/internal/notice -update
	go test ./cmd/attn/internal/bench -run TestResults -update
	go test ./cmd/attn-onnx/internal/onnx -run Generated -update
	cd kernels/adapters/gomlx && GOWORK=off go test -run Generated -update .

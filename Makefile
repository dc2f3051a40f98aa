# make test    everything that must hold: formatting, vet, staticcheck, all tests with
#              cgo, gpu and kernels again without, the race detector
# make bench   the main job: attention on every backend, with its ceiling beside it
# make build   one binary, ./attn
# make update  refresh golden files and generated assembly

.PHONY: test bench build update

test:
	@sh .ci/test

bench:
	go run ./cmd/attn bench

build:
	go build -o attn ./cmd/attn

update:
	cd cpu/internal/peak && go generate ./...
	go test ./cmd/... -update

#!/bin/bash -eu
# Builds the fuzz targets as OSS-Fuzz does it, and their seeds. libFuzzer's targets ignore f.Add: a
# seed is a file of bytes from which go-118-fuzz-build makes the arguments. Numbers and bools come
# first, then a byte for each slice, its share of the rest, then the slices. One slice gets all.
# A test compares the list with the fuzz targets of the tree.
cd "$SRC/attn"

# target FOLDER FUNCTION PREFIX FILES: builds a target, and a seed of each file with PREFIX before it,
# in the form of printf. The wrapper writes a main package into the working folder, which must be one that may
# import internal packages.
target() {
	local folder=$1 function=$2 prefix=$3
	shift 3
	local seeds=$WORK/$function n=0 file
	mkdir -p "$seeds"
	for file in "$@"; do
		n=$((n + 1))
		# shellcheck disable=SC2059
		{ printf "$prefix" && cat "$file"; } >"$seeds/$n"
	done
	zip -qj "$OUT/${function}_seed_corpus.zip" "$seeds"/*
	(
		cd "$folder"
		printf 'package %s\nimport _ "github.com/AdamKorcz/go-118-fuzz-build/testing"\n' "$(go list -f '{{.Name}}' .)" >fuzzdependency.go
		go get github.com/AdamKorcz/go-118-fuzz-build/testing
		compile_native_go_fuzzer_v2 "$(go list .)" "$function" "$function"
		rm fuzzdependency.go
	)
}
export GOWORK=off

# Formats that the repository has no file of.
made=$WORK/made
mkdir -p "$made"
printf '\223NUMPY\001\000\166\000%-117s\n\000\000\200?\000\000\000@' "{'descr': '<f4', 'fortran_order': False, 'shape': (2,), }" >"$made/f4.npy"
printf '{"format": "attn tuning", "version": 2, "entries": []}' >"$made/tuning.json"
printf '\067\000\000\000\000\000\000\000%s\000\000\200?' '{"wq":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}' >"$made/small.safetensors"

target kernels/npy FuzzNPY '\000\001' "$made/f4.npy"
target kernels/safetensors FuzzHeader '\001' "$made/small.safetensors"
target kernels/nn FuzzSafetensors '\001' "$made/small.safetensors"
target kernels/nn FuzzParseConfig '\001' kernels/nn/testdata/configs/*.json
target cmd/attn/internal/explain FuzzWalkthrough '\001' kernels/kernelstest/testdata/worked-examples/*.json
target cmd/attn/internal/heatmap FuzzLabels '\001' kernels/kernelstest/testdata/models/*.labels.json
target bench/report FuzzReport '\001' bench/report/testdata/*.json
target gpu/internal/tunefile FuzzParse '\001' "$made/tuning.json"
target cmd/attn-onnx/internal/onnxfile FuzzDecodeModel '\001' cmd/attn-onnx/testdata/onnx*/test_*/model.onnx
target cmd/attn-onnx/internal/onnxfile FuzzDecodeTensor '\001' cmd/attn-onnx/testdata/onnx*/test_*/test_data_set_0/*.pb
target cmd/attn-onnx/internal/onnx FuzzONNXCase '\377\000\000\000\000' cmd/attn-onnx/testdata/onnx*/test_*/model.onnx
target cmd/attn-onnx/internal/onnx FuzzJSONC '\001' cmd/attn-onnx/testdata/onnxruntime/*.jsonc

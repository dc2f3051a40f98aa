#!/bin/sh
# Measures the rows of the table in docs/gpu.md on the GPU of this machine, each with its
# ceiling:
#
#	sh bench/gpu.sh            # about ten minutes on a large GPU
#	sh bench/gpu.sh --plan     # how each row would run, without running it
#
# Arguments go to each 'attn bench'. ADAPTER=gpu:1 chooses another adapter.
set -u
cd "$(dirname "$0")/.."
adapter=${ADAPTER:-gpu}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
go build -o "$folder/attn" ./cmd/attn || exit 1
failed=0

row() {
	printf '\n== %s\n' "$1"
	shift
	echo "\$ $*"
	"$@" || failed=1
}
bench() {
	name=$1
	shift
	row "$name" "$folder/attn" bench --backend "$adapter" "$@"
}

case " $* " in *" --plan "*) ;; *) bench "ceilings" --ceilings ;; esac
for dim in 64 128; do
	bench "prefill f32, D=$dim" --heads 16 --seq 8k --dim $dim "$@"
	bench "prefill f32 causal, D=$dim" --heads 16 --seq 8k --dim $dim --causal "$@"
done
for dim in 80 96 256; do
	bench "prefill f32, D=$dim" --heads 16 --seq 8k --dim $dim "$@"
done
for dim in 64 128; do
	bench "prefill bf16 storage, D=$dim" --heads 16 --seq 8k --dim $dim --dtype bf16 "$@"
done
bench "decode, bf16, 65,536 keys" --seq-q 1 --seq 64k --heads 32 --kv-heads 8 --dim 128 --dtype bf16 "$@"
bench "a million keys and queries, one head" --heads 1 --seq 1M "$@"
bench "262,144 keys, resident" --seq-q 16384 --seq 256k "$@"
bench "262,144 keys, streamed through 256 MiB" --seq-q 16384 --seq 256k --device-memory 256M "$@"
case " $* " in
*" --plan "*) ;;
*)
	row "call overhead, S=64" go test -run '^$' -bench CallOverhead ./gpu
	row "providers: go-webgpu" go test -run '^$' -bench 'Provider|IndexClamps' ./gpu ./gpu/internal/meter
	row "providers: gogpu" env CGO_ENABLED=0 go test -run '^$' -bench 'Provider|IndexClamps' ./gpu ./gpu/internal/meter
	if command -v node >/dev/null; then
		row "PyTorch in turns" node bench/peers/run.mjs --on gpu --gpu "$adapter"
	else
		echo "node is not installed: PyTorch is not compared"
	fi
	;;
esac
exit $failed

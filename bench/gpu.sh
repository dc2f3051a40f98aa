#!/bin/sh
# Measures the rows of the table in docs/gpu.md on the GPU of this machine, each with its
# ceiling:
#
#	sh bench/gpu.sh                  # about twenty minutes on a large GPU
#	sh bench/gpu.sh --plan           # how each row would run, without running it
#	sh bench/gpu.sh --bundle DIR     # a folder for a machine with a GPU and nothing else
#	sh DIR/gpu.sh                    # there
#
# It runs the conformance suite with both WebGPU libraries first. Arguments go to each
# 'attn bench'. ADAPTER=gpu:1 chooses another adapter, ONLY='f32*' the rows whose names
# match a pattern of the shell. The results are in results.json of
# the bundle (without --bundle, in bench/gpu-results.json), of which
#
#	attn bench --gpu-table results.json
#
# makes the rows. In a bundle the script uses the shell alone: no Go, no network, no other
# program. The machine needs its driver, the Vulkan loader and the C library.
set -uf
here=$(cd "${0%/*}" && pwd)

if [ ! -x "$here/attn" ]; then # not in a bundle: make one
	cd "$here/.."
	case ${1:-} in
	--bundle)
		[ $# -ge 2 ] || { echo "--bundle needs a folder" >&2; exit 2; }
		folder=$2
		;;
	*)
		folder=$(mktemp -d)
		trap 'rm -rf "$folder"' EXIT
		;;
	esac
	set -e
	mkdir -p "$folder/gpu" "$folder/meter" "$folder/cache"
	CGO_ENABLED=1 go build -trimpath -o "$folder/attn" ./cmd/attn
	CGO_ENABLED=1 go test -c -trimpath -o "$folder/gpu/gpu.test" ./gpu
	CGO_ENABLED=0 go test -c -trimpath -o "$folder/gpu/gpu-gogpu.test" ./gpu
	CGO_ENABLED=1 go test -c -trimpath -o "$folder/meter/meter.test" ./gpu/internal/meter
	CGO_ENABLED=0 go test -c -trimpath -o "$folder/meter/meter-gogpu.test" ./gpu/internal/meter
	cp -r gpu/testdata "$folder/gpu/"
	cp bench/gpu.sh bench/peers/torch_peer.py bench/peers/torch_table.py "$folder/"
	[ "${1:-}" != --bundle ] || { echo "run: sh $folder/gpu.sh"; exit 0; }
	set +e
	sh "$folder/gpu.sh" "$@"
	failed=$?
	[ ! -f "$folder/results.json" ] || cp "$folder/results.json" bench/gpu-results.json
	exit $failed
fi

cd "$here"
adapter=${ADAPTER:-gpu}
only=${ONLY:-*}
export XDG_CACHE_HOME="$here/cache" # variants that attn tune finds, and drivers' caches
results=$here/results.json
plan=0
case " $* " in *" --plan "*) plan=1 ;; esac
failed=0
comma=

# field prints a name and a string of JSON. Words are separated by one space each.
field() {
	printf '"%s": "' "$1"
	shift
	printf '%s' "$*"
	printf '"'
}
# lines prints the lines of a file of text that have neither quotes nor backslashes, as a
# list of strings of JSON.
lines() {
	sep=
	printf '['
	while read -r line || [ -n "$line" ]; do
		case $line in *\"* | *\\*) continue ;; esac
		set -- $line
		printf '%s"%s"' "$sep" "$*"
		sep=', '
	done <"$1"
	printf ']'
}
copy() { while IFS= read -r line || [ -n "$line" ]; do printf '%s\n' "$line"; done <"$1"; }
clear() { : >"$1"; }

# row NAME AIM OTHER: a call of attn bench with the arguments that follow. A row that is
# compared with another row names it.
row() {
	name=$1 aim=$2 other=$3
	case $name in $only) ;; *) return ;; esac
	shift 3
	printf '\n== %s\n$ attn bench %s\n' "$name" "$*"
	if [ $plan = 1 ]; then
		./attn bench --backend "$adapter" "$@" || failed=1
		return
	fi
	clear row.json
	ok=true
	./attn bench --backend "$adapter" --json row.json "$@" || { ok=false failed=1; }
	{
		printf '%s\n{%s, %s, %s, %s, "ok": %s, "report": ' "$comma" \
			"$(field name "$name")" "$(field aim "$aim")" "$(field against "$other")" "$(field flags "$@")" $ok
		if [ -s row.json ]; then copy row.json; else printf null; fi
		printf '}'
	} >>"$results"
	comma=,
}
# program NAME AIM: a program whose lines of text are the result.
program() {
	name=$1 aim=$2
	shift 2
	case $name in $only) ;; *) return ;; esac
	[ $plan = 0 ] || return 0
	printf '\n== %s\n$ %s\n' "$name" "$*"
	ok=true
	"$@" >program.txt 2>&1 || { ok=false failed=1; }
	copy program.txt
	{
		printf '%s\n{%s, %s, "ok": %s, "lines": ' "$comma" "$(field name "$name")" "$(field aim "$aim")" $ok
		lines program.txt
		printf '}'
	} >>"$results"
	comma=,
}
in_folder() { (cd "$1" && shift && "$@"); }

[ $plan = 1 ] || printf '{"gpu_table": 1, "rows": [' >"$results"
program "suite, go-webgpu" "passes" in_folder gpu ./gpu.test -test.run TestConformance
program "suite, gogpu" "passes" in_folder gpu ./gpu-gogpu.test -test.run TestConformance
program "variants" "" ./attn tune --backend "$adapter" --budget 2m
[ $plan = 1 ] || row "ceilings" "" "" --ceilings
row "f32, H=16 S=8192 D=64" "60% of the FMA peak" "" --heads 16 --seq 8k --dim 64 "$@"
row "f32, H=16 S=8192 D=128" "60%" "" --heads 16 --seq 8k --dim 128 "$@"
row "the same, causal" "55%" "" --heads 16 --seq 8k --dim 64,128 --causal "$@"
row "f32, D=80, 96, 256" "50%" "" --heads 16 --seq 8k --dim 80,96,256 "$@"
row "bf16 storage, f32 arithmetic, D=64, 128" "50%" "" --heads 16 --seq 8k --dim 64,128 --dtype bf16 "$@"
row "decode: Sq=1, Sk=65,536, H=32, 8 kv heads, D=128, bf16" "70% of the copy bandwidth" "" \
	--seq-q 1 --seq 64k --heads 32 --kv-heads 8 --dim 128 --dtype bf16 "$@"
row "S=1,048,576, D=64, one head" "completes" "" --heads 1 --seq 1M "$@"
row "262,144 keys, resident" "" "" --seq-q 16384 --seq 256k "$@"
row "262,144 keys through 256 MiB of device memory" "70% of the resident speed" "262,144 keys, resident" \
	--seq-q 16384 --seq 256k --device-memory 256M "$@"
program "S=64, above an empty dispatch" "50 µs" in_folder gpu ./gpu.test -test.run '^$' -test.bench CallOverhead
program "providers: go-webgpu" "" in_folder gpu ./gpu.test -test.run '^$' -test.bench Provider
program "providers: gogpu" "" in_folder gpu ./gpu-gogpu.test -test.run '^$' -test.bench Provider
program "index clamps: go-webgpu" "" in_folder meter ./meter.test -test.run '^$' -test.bench IndexClamps
program "index clamps: gogpu" "" in_folder meter ./meter-gogpu.test -test.run '^$' -test.bench IndexClamps
[ $plan = 0 ] || exit $failed

printf '\n], "peers": ' >>"$results"
clear peers.json
for python in python3 /usr/bin/python3; do
	if [ ! -s peers.json ] && [ -n "$(command -v $python)" ]; then
		$python torch_table.py >peers.json
	fi
done
if [ -s peers.json ]; then copy peers.json >>"$results"; else
	echo "there is no PyTorch with a CUDA device: it is not compared"
	printf '[]' >>"$results"
fi
printf '}\n' >>"$results"
echo
./attn bench --gpu-table "$results" || failed=1
exit $failed

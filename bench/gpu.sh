#!/bin/sh
# gpu.sh: measures and tests a GPU on a machine that has a checkout of this repository but needs no Go.
#
#     sh bench/gpu.sh build DIR            where Go is: builds the programs for Linux on amd64 into DIR, and with
#                                          apt-get Dawn and its libraries; DIR/pack.tgz has all of it, under 64 MiB
#     sh bench/gpu.sh run DIR OUT [TIME]   where the GPU is: about TIME seconds (600), what they print goes to OUT
#
# Matrix units come first, with Dawn: tests of 120 seconds, then decoding in f16 and bf16, prefill in these and f32, gradients,
# `attn bench --preset gpu`, and the machine code that the driver made, in its cache. Then it measures the linked provider: its
# kernels (a minute) and the same preset, next to PyTorch where node and a PyTorch with CUDA are installed. With the time that
# is left it runs the conformance suite on both linked providers. Drivers compile for seconds: the suite takes 16 processors
# several minutes. A line at the end counts what passed, failed and was cut short.
set -eu
cd "$(dirname "$0")/.."
case "${1:-}" in
build)
	mkdir -p "$2"
	export GOOS=linux GOARCH=amd64
	for provider in go-webgpu gogpu; do
		CGO_ENABLED=$(test "$provider" = gogpu && echo 0 || echo 1)
		export CGO_ENABLED
		go test -c -ldflags '-s -w' -o "$2/gpu-$provider.test" ./gpu
	done
	export CGO_ENABLED=1
	go build -ldflags '-s -w' -o "$2/attn" ./cmd/attn
	go build -ldflags '-s -w' -o "$2/attn-peer" ./bench/peers/attn
	files="attn attn-peer gpu-go-webgpu.test gpu-gogpu.test"
	if command -v apt-get >/dev/null && .ci/sid; then # Dawn, the loader that starts a program with it, and all that they need
		from=$PWD/.cache/sid/usr/lib/x86_64-linux-gnu
		mkdir -p "$2/dawn"
		for library in libwebgpu_dawn.so.0 libvulkan.so.1 libX11.so.6 libXext.so.6 libGLdispatch.so.0 libdl.so.2 libpthread.so.0 librt.so.1 libresolv.so.2; do
			echo "$library"
			"$from/ld-linux-x86-64.so.2" --library-path "$from" --list "$from/$library" | sed -n 's/^[[:space:]]*\([^ ]*\) => .*/\1/p'
		done | sort -u | while read -r library; do if [ -e "$from/$library" ]; then cp -L "$from/$library" "$2/dawn"; fi; done
		cp -L "$from/ld-linux-x86-64.so.2" "$2/dawn"
		files="$files dawn"
	fi
	# shellcheck disable=SC2086
	tar -C "$2" -czf "$2/pack.tgz" $files
	exit
	;;
run) ;;
*)
	sed -n '2,/^set/s/^# \{0,1\}//p' "$0" | sed 1d
	exit 2
	;;
esac
mkdir -p "$3"
programs=$(cd "$2" && pwd) out=$(cd "$3" && pwd) end=$(($(date +%s) + ${4:-600}))
export CI=true
left() { echo $((end - $(date +%s) > 5 ? end - $(date +%s) : 5)); }
# within SECONDS COMMAND: runs a command for so long at most, and says where its output is.
within() {
	seconds=$1 log=$out/$2.txt
	shift 2
	status=0
	timeout -s INT -k 10 "$(test "$(left)" -lt "$seconds" && left || echo "$seconds")" "$@" >"$log" 2>&1 || status=$?
	echo "$(basename "$log"): status $status, ${end} - $(date +%s) seconds left" | awk '{ print $1, $2, $3, $4 - $6, "seconds left" }'
}
cd gpu
if [ -e "$programs/dawn" ]; then
	for icd in "${VK_DRIVER_FILES:-}" /usr/share/vulkan/icd.d/nvidia_icd*.json /etc/vulkan/icd.d/nvidia_icd*.json /usr/local/nvidia/share/vulkan/icd.d/nvidia_icd*.json; do
		if [ -e "$icd" ]; then break; fi
	done
	if [ ! -e "$icd" ]; then # containers may have the driver without its description
		icd=$out/nvidia_icd.json
		echo '{"file_format_version": "1.0.0", "ICD": {"library_path": "libGLX_nvidia.so.0", "api_version": "1.3.0"}}' >"$icd"
	fi
	# dawn SECONDS NAME PROGRAM ARGUMENTS: runs a program with Dawn, and keeps NVIDIA's cache of machine code.
	dawn() {
		seconds=$1 name=$2 program=$3
		shift 3
		within "$seconds" "$name" env ATTN_WEBGPU=libwebgpu_dawn.so.0 VK_DRIVER_FILES="$icd" __GL_SHADER_DISK_CACHE_PATH="$out" "$programs/dawn/ld-linux-x86-64.so.2" --library-path \
			"$programs/dawn:/usr/lib/x86_64-linux-gnu:/usr/lib64:/usr/local/nvidia/lib64" "$programs/$program" "$@"
	}
	dawn 30 devices-dawn attn devices
	dawn 120 matrices-tests gpu-go-webgpu.test -test.short -test.v -test.run 'TestMatrix|TestConformance$/LowPrecision/(b?f16|f8|f32)'
	dawn 180 matrices gpu-go-webgpu.test -test.run '^$' -test.bench Matrices -test.benchtime 2x
	dawn 120 preset-dawn attn bench --preset gpu --json "$out/preset-dawn.json" --markdown "$out/preset-dawn.md"
	if [ -e "$out/GLCache" ]; then tar -C "$out" -czf "$out/machine-code.tgz" GLCache && rm -r "$out/GLCache"; fi
fi
within 30 devices "$programs/attn" devices
within 120 kernels "$programs/gpu-go-webgpu.test" -test.run '^$' -test.bench 'Kernels|CallOverhead' -test.benchtime 5x
cd ..
within 180 preset "$programs/attn" bench --preset gpu --json "$out/preset.json" --markdown "$out/preset.md"
if command -v node >/dev/null; then
	# run.mjs builds its program with go: here it gets the one that was built before.
	mkdir -p "$out/go" && printf '#!/bin/sh\ncp "%s" "$3"\n' "$programs/attn-peer" >"$out/go/go" && chmod +x "$out/go/go"
	PATH=$out/go:$PATH within 120 peers node bench/peers/run.mjs --on gpu --repetitions 3 --json "$out/peers.json"
fi
cd gpu
for provider in go-webgpu gogpu; do
	for group in 'Unsupported|Transfer|Cases|Copy|Batch' 'Packed|Edges|WorkedExamples|Merge|Scores|TopWeights' Pairs 'Caches|KVCache|PagedCache|Hadamard' \
		'HeadSizes|Models' 'Projections|Rotate|MultiHead|Stages' 'ScoreMods|LowPrecision' KeyIndices 'Drawn|Extremes|Small|Properties' Against \
		'Gradients|SmallGradients' 'Histories|Refused|Plan|Concurrent|Cancel|Release|Close'; do
		timeout -k 10 "$(left)" "$programs/gpu-$provider.test" -test.short -test.v -test.timeout 0 -test.run "TestConformance\$/($group)\$" \
			>"$out/suite-$provider-$(echo "$group" | cut -d'|' -f1).txt" 2>&1 || true &
	done
done
wait
cat "$out"/suite-*.txt | awk '/--- PASS/ { pass++ } /--- FAIL/ { fail++; print } END { print pass + 0, "passed,", fail + 0, "failed" }'
for f in "$out"/suite-*.txt; do tail -n 1 "$f" | grep -qE '^(PASS|FAIL)' || echo "cut short: $(basename "$f") in $(grep '=== RUN' "$f" | tail -n 1)"; done

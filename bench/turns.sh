#!/bin/sh
# Compares the working tree with another revision: each benchmark of bench/internal/speed whose name
# matches PATTERN runs at both in TURNS turns (7), and benchstat prints the medians.
#
#	sh bench/turns.sh REVISION PATTERN [TURNS]
#	sh bench/turns.sh HEAD~3 'Inference/threads1/decode'
#
# Both sides run the benchmarks of the working tree, which call exported functions alone.
set -eu
[ $# -ge 2 ] || { sed -n '2,/^$/s/^# \{0,1\}//p' "$0" >&2; exit 2; }
revision=$1 pattern=$2 turns=${3:-7}
cd "$(dirname "$0")/.."
dir=$(mktemp -d)
trap 'git worktree remove --force "$dir/tree"; rm -rf "$dir"' EXIT
git worktree add -q --detach "$dir/tree" "$revision"
rm -rf "$dir/tree/bench/internal/speed"
mkdir -p "$dir/tree/bench/internal"
cp -R bench/internal/speed "$dir/tree/bench/internal/"
(cd "$dir/tree" && go test -c -o "$dir/before" ./bench/internal/speed)
go test -c -o "$dir/after" ./bench/internal/speed

"$dir/after" -test.run '^$' -test.bench "$pattern" -test.benchtime 1x | sed -n 's/^\(Benchmark[^ ]*\)[ 	].*/\1/p' | sed 's/-[0-9]*$//' >"$dir/names"
[ -s "$dir/names" ] || { echo "no benchmark matches $pattern" >&2; exit 1; }
while read -r name; do
	one=$(printf %s "$name" | sed 's/[.+*?()%]/\\&/g; s,/,$/^,g')
	for _ in $(seq "$turns"); do
		for side in before after; do
			"$dir/$side" -test.run '^$' -test.bench "^$one\$" -test.benchtime 3x >>"$dir/$side.txt"
		done
	done
	echo "$name" >&2
done <"$dir/names"
go tool benchstat -filter '.unit:(sec/op OR "%ofCeiling" OR "%ofBase" OR "µs/over" OR "ms/latency")' "before=$dir/before.txt" "after=$dir/after.txt"

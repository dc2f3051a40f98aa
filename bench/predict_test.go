package bench

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/seed90331342/attn/kernels"
)

func TestParseSeqs(t *testing.T) {
	for _, tc := range []struct {
		list string
		want []int
	}{
		{"256", []int{256}},
		{"1k", []int{1024}},
		{"1K, 2M", []int{1024, 2 << 20}},
		{"4096,256,1k", []int{256, 1024, 4096}},
		{"256..4k", []int{256, 512, 1024, 2048, 4096}},
		{"300..1000", []int{300, 600}},
		{"512..512", []int{512}},
		{"256..1k,512,100", []int{100, 256, 512, 1024}},
	} {
		got, err := ParseSeqs(tc.list)
		if err != nil {
			t.Errorf("%q: %v", tc.list, err)
		}
		if diff := cmp.Diff(tc.want, got); diff != "" {
			t.Errorf("%q (-want +got):\n%s", tc.list, diff)
		}
	}
}

func TestParseSeqsRefuses(t *testing.T) {
	for _, list := range []string{"", "0", "-5", "abc", "k", "256,", "1.5k", "4k..256", "256..", "..256", "2048M", "99999999999999999999", "9999999999999k", "1e3"} {
		got, err := ParseSeqs(list)
		if !errors.Is(err, kernels.ErrOption) {
			t.Errorf("%q gives %v and the error %v, it should be refused as an option", list, got, err)
		} else if strings.Contains(err.Error(), "\n") {
			t.Errorf("%q: the error takes more than a line: %q", list, err)
		}
	}
}

func TestPredictionGrowsWithFLOPs(t *testing.T) {
	var c cost
	if c.predict(1e9) != 0 {
		t.Errorf("without a call there is nothing to predict from, got %v", c.predict(1e9))
	}
	c = cost{seconds: 0.25, weight: 1e9}
	if got := c.predict(4e9); got != 1 {
		t.Errorf("four times the work of 0.25 s is predicted as %v s", got)
	}
}

func TestRounds(t *testing.T) {
	for _, tc := range []struct {
		why         string
		seconds     float64
		rounds, per int
	}{
		{"too short to measure", 0, settleRounds, maxEach},
		{"as many as are useful", 1e-6, settleRounds, maxEach},
		{"fill a round", 0.01, settleRounds, 5},
		{"one is a round", 0.1, settleRounds, 1},
		{"fewer of long ones", 0.6, 4, 1},
		{"never fewer than three", 2, 3, 1},
		{"but of those that take very long", 5, 2, 1},
		{"even forever", 1e6, 2, 1},
	} {
		if r, e := leastRounds(tc.seconds), perRound(tc.seconds); r != tc.rounds || e != tc.per {
			t.Errorf("%s: a call of %v s is repeated in %d rounds of %d, should be %d of %d", tc.why, tc.seconds, r, e, tc.rounds, tc.per)
		}
	}
}

func TestAdmit(t *testing.T) {
	for _, tc := range []struct {
		why            string
		seconds, limit float64
		left           time.Duration
		want           string
	}{
		{"fits", 0.1, 1, time.Second, ""},
		{"nothing bounds it", 3600, 0, -1, ""},
		{"unknown cost runs", 0, 1, 0, ""},
		{"over the limit of a sweep", 3.21, 1, -1, "predicted 3.21 s each, a sweep ends at 1.00 s (give --seq for more)"},
		{"warm-up and repetitions exceed what is left", 0.3, 1, time.Second, "predicted 300 ms each, 1.00 s of the budget is left"},
	} {
		if got := admit(tc.seconds, tc.limit, tc.left); got != tc.want {
			t.Errorf("%s: %q, want %q", tc.why, got, tc.want)
		}
	}
}

func TestBackendsShareTheBudget(t *testing.T) {
	if got := share(time.Minute, 3); got != 20*time.Second {
		t.Errorf("three backends get %v each of a minute", got)
	}
	if got := share(time.Minute, 1); got != time.Minute {
		t.Errorf("the last backend gets %v of the minute left", got)
	}
}

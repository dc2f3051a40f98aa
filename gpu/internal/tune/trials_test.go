package tune

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
)

// made describes a candidate with a time for a round and optional failures.
type made struct {
	name        string
	took        time.Duration
	wrong, slow error // of try and of time
}

func (m made) candidate(log *[]string) candidate {
	return candidate{
		name: m.name,
		try: func(context.Context) error {
			*log = append(*log, "try "+m.name)
			return m.wrong
		},
		time: func(_ context.Context, rounds int) (time.Duration, error) {
			*log = append(*log, fmt.Sprintf("time %s x%d", m.name, rounds))
			return time.Duration(rounds) * m.took, m.slow
		},
	}
}

// Trials choose the fastest candidate that is right and store the failures of others.
func TestTrials(t *testing.T) {
	const ms = time.Millisecond
	lost := fmt.Errorf("gone: %w", backend.ErrDeviceLost)
	wrong := fmt.Errorf("o[3]: %w", errWrong)
	plain := made{name: plainName, took: 4 * ms}
	for _, c := range []struct {
		name    string
		before  []Trial
		list    []made
		best    string
		failed  map[string]string
		untried []string
		err     error
	}{
		{name: "the fastest", list: []made{plain, {name: "L", took: 3 * ms}, {name: "M", took: 2 * ms}, {name: "S", took: 5 * ms}}, best: "M"},
		{name: "a reference never wins against another variant", list: []made{{name: plainName, took: ms}, {name: "L", took: 3 * ms}}, best: "L"},
		{name: "a reference alone does", list: []made{plain, {name: "L", wrong: wrong}}, best: plainName,
			failed: map[string]string{"L": wrong.Error()}},
		{name: "the fastest is wrong", list: []made{plain, {name: "L", took: 3 * ms}, {name: "M", took: ms, wrong: wrong}}, best: "L",
			failed: map[string]string{"M": wrong.Error()}},
		{name: "one fails when it is timed", list: []made{plain, {name: "L", slow: errors.New("stuck")}, {name: "M", took: 9 * ms}}, best: "M",
			failed: map[string]string{"L": "stuck"}},
		{name: "one failed before", before: []Trial{{Variant: "M", Failed: "lost the device"}},
			list: []made{plain, {name: "L", took: 3 * ms}, {name: "M", took: ms}}, best: "L",
			failed: map[string]string{"M": "lost the device"}, untried: []string{"M"}},
		{name: "there is no room", list: []made{plain, {name: "L", took: 3 * ms}, {name: "M", wrong: fmt.Errorf("2 GiB: %w", backend.ErrMemory)}}, best: "L"},
		{name: "there is no room for any", list: []made{plain, {name: "L", wrong: wrong}, {name: "M", wrong: backend.ErrMemory}},
			failed: map[string]string{"L": wrong.Error()}},
		{name: "the device is lost", list: []made{plain, {name: "L", took: 3 * ms}, {name: "M", wrong: lost}, {name: "S", took: ms}},
			err: backend.ErrDeviceLost, failed: map[string]string{"M": lost.Error()}, untried: []string{"S"}},
		{name: "the device is lost while one is timed", list: []made{plain, {name: "L", slow: lost}, {name: "S", took: ms}},
			err: backend.ErrDeviceLost, failed: map[string]string{"L": lost.Error()}, untried: []string{"S"}},
		{name: "nothing runs", list: []made{{name: plainName, wrong: wrong}, {name: "L", wrong: wrong}},
			failed: map[string]string{plainName: wrong.Error(), "L": wrong.Error()}},
	} {
		t.Run(c.name, func(t *testing.T) {
			var log []string
			var list []candidate
			for _, m := range c.list {
				list = append(list, m.candidate(&log))
			}
			e := Entry{Trials: c.before}
			err := trials(t.Context(), list, &e, 0, func(running string) { log = append(log, "keep "+running) })
			if !errors.Is(err, c.err) || (err == nil) != (c.err == nil) || e.Best != c.best {
				t.Errorf("best %q, %v", e.Best, err)
			}
			failed := map[string]string{}
			for _, x := range e.Trials {
				if x.Failed != "" {
					failed[x.Variant] = x.Failed
				}
			}
			if d := cmp.Diff(c.failed, failed, cmpopts.EquateEmpty()); d != "" {
				t.Error(d)
			}
			for _, m := range c.list {
				try := slices.Index(log, "try "+m.name)
				if tried := try >= 0; tried == slices.Contains(c.untried, m.name) || tried && (try == 0 || log[try-1] != "keep "+m.name) {
					t.Errorf("%s in %q", m.name, log)
				}
			}
		})
	}
}

// A spent budget ends the trials, but not before three candidates were tried and each of them timed three times.
func TestTrialsWithinABudget(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		timed := map[string]int{}
		slow := func(name string) candidate {
			return candidate{
				name: name,
				try:  func(context.Context) error { time.Sleep(time.Second); return nil },
				time: func(_ context.Context, rounds int) (time.Duration, error) {
					timed[name]++
					time.Sleep(10 * time.Millisecond)
					return 10 * time.Millisecond, nil
				},
			}
		}
		list := []candidate{slow(plainName), slow("S"), slow("L"), slow("M"), slow("L32")}
		wrong := slices.Clone(list)
		for i := 1; i < 4; i++ {
			wrong[i].try = func(context.Context) error { time.Sleep(time.Second); return errWrong }
		}
		var last Entry
		if err := trials(t.Context(), wrong, &last, time.Millisecond, func(string) {}); err != nil || last.Best != "L32" {
			t.Errorf("the last one alone is right: best %q, %v", last.Best, err)
		}
		for _, c := range []struct {
			budget       time.Duration
			tried, times int
		}{
			{0, 5, 1 + trialRepeats},
			{time.Minute, 5, 1 + trialRepeats},
			{3500 * time.Millisecond, 4, 1 + minTrialRepeats},
			{time.Millisecond, alwaysTried, 1 + minTrialRepeats},
		} {
			clear(timed)
			var e Entry
			if err := trials(t.Context(), list, &e, c.budget, func(string) {}); err != nil || e.Best == "" {
				t.Errorf("%v: best %q, %v", c.budget, e.Best, err)
			}
			if len(e.Trials) != c.tried || len(timed) != c.tried || timed["S"] != c.times {
				t.Errorf("%v: %d tried, timed %v", c.budget, len(e.Trials), timed)
			}
		}
	})
}

// A cancelled context is not a failure of any candidate.
func TestTrialsCancelled(t *testing.T) {
	for _, when := range []string{"try M", "time M x1"} {
		ctx, cancel := context.WithCancel(t.Context())
		var log []string
		m := made{name: "M", took: time.Millisecond}.candidate(&log)
		try, timing := m.try, m.time
		stop := func() error {
			if log[len(log)-1] == when {
				cancel()
				return fmt.Errorf("gpu: %w", ctx.Err())
			}
			return nil
		}
		m.try = func(ctx context.Context) error { return errors.Join(try(ctx), stop()) }
		m.time = func(ctx context.Context, rounds int) (time.Duration, error) {
			took, err := timing(ctx, rounds)
			return took, errors.Join(err, stop())
		}
		e := Entry{Trials: []Trial{{Variant: "S", Failed: "lost"}}}
		var kept []Trial
		err := trials(ctx, []candidate{made{name: "L", took: time.Millisecond}.candidate(&log), m}, &e, 0, func(string) { kept = slices.Clone(e.Trials) })
		if !errors.Is(err, context.Canceled) || len(kept) != 1 || kept[0].Variant != "S" {
			t.Errorf("%s: kept %+v, %v", when, kept, err)
		}
		cancel()
	}
}

// The median decides, not the shortest time, and short calls are timed many at once.
func TestTrialsTakeMedians(t *testing.T) {
	for _, c := range []struct {
		took   time.Duration
		rounds int
	}{{time.Microsecond, maxRounds}, {time.Millisecond, 5}, {time.Second, 1}, {0, maxRounds}} {
		n := 0
		lucky := candidate{name: "lucky", try: func(context.Context) error { return nil },
			time: func(_ context.Context, rounds int) (time.Duration, error) {
				if n++; n == 3 {
					return 1, nil // a clock that jumped
				}
				return time.Duration(rounds) * 2 * c.took, nil
			}}
		var log []string
		e := Entry{}
		steady := made{name: "steady", took: c.took}
		must.Do(t, trials(t.Context(), []candidate{lucky, steady.candidate(&log)}, &e, 0, func(string) {}))
		if want := fmt.Sprintf("time steady x%d", c.rounds); log[len(log)-1] != want {
			t.Errorf("%v a round: %q, not %q", c.took, log[len(log)-1], want)
		}
		if c.took > 0 && (e.Best != "steady" || time.Duration(e.Trial("steady").Seconds*1e9+0.5) != c.took) {
			t.Errorf("%v a round: %+v", c.took, e)
		}
	}
}

package cpu

import (
	"errors"
	"strings"
	"testing"

	"github.com/seed90331342/attn/backend"
	"github.com/seed90331342/attn/kernels/kernelstest/must"
)

// TestTiers shows how a tier is chosen, and the errors for an unknown one.
func TestTiers(t *testing.T) {
	t.Setenv(tierEnv, "")
	all := Tiers()
	if all[len(all)-1] != tierGonum {
		t.Fatalf("tiers are %v, the last must be %s", all, tierGonum)
	}
	for _, c := range []struct{ say, option, env, want string }{
		{"no choice", "", "", all[0]},
		{"the variable", "", tierGonum, tierGonum},
		{"the option before the variable", all[0], tierGonum, all[0]},
		{"gonum", tierGonum, "", tierGonum},
	} {
		t.Setenv(tierEnv, c.env)
		be := must.Get(Open(Options{Tier: c.option}))(t)
		if got := be.kernels.Tier; got != c.want {
			t.Errorf("%s: tier is %s, want %s", c.say, got, c.want)
		}
		info := be.Info()
		if !strings.Contains(info.Provider, c.want) || !strings.Contains(info.Provider, strings.Join(all, ", ")) {
			t.Errorf("%s: provider is %q", c.say, info.Provider)
		}
		p, err := be.Plan(t.Context(), plain(t, 1, 8, 8))
		if err != nil || !strings.Contains(p.Path, c.want) {
			t.Errorf("%s: path is %q, error %v", c.say, p.Path, err)
		}
	}

	t.Setenv(tierEnv, "mmx")
	if _, err := backend.Open("cpu"); !errors.Is(err, ErrTier) || !errors.Is(err, backend.ErrOption) || !strings.Contains(err.Error(), tierEnv) || !strings.Contains(err.Error(), "mmx") {
		t.Errorf("an unknown tier: error %v", err)
	}
	be := New(Options{Tier: "sse"})
	c := plain(t, 1, 8, 8)
	must.Fail(t, "a call on an unknown tier", be.Attention(t.Context(), c), ErrTier, "sse")
	must.Fail(t, "a plan on an unknown tier", must.Err(be.Plan(t.Context(), c)), ErrTier)
	must.Do(t, be.Close())
}

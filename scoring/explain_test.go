package scoring

import (
	"strings"
	"testing"
)

func TestExplanationInWords(t *testing.T) {
	e := Explanation{Policy: "auto", Chosen: "p/a", RunnerUp: "p/b", AheadBy: -12, Endpoints: []EndpointExplanation{
		{ID: "p/a", Chosen: true, Age: 1, Fresh: true, PrefillTokensPerSecond: 1, Terms: &Terms{New: 100, Slowness: 1}, Cost: 100},
		{ID: "p/b", Age: 1, Fresh: true, PrefillTokensPerSecond: 1, Terms: &Terms{New: 88, Slowness: 1}, Cost: 88},
		{ID: "p/c", Filtered: FilterServes.String()},
		{ID: "p/d", Filtered: FilterNotReady.String()},
	}}
	s := e.String()
	for _, want := range []string{"runner-up: p/b, 12 tokens less: a near tie", "does not serve this model\n", "filtered: not ready\n", "age: of the last scrape"} {
		if !strings.Contains(s, want) {
			t.Errorf("no %q in:\n%s", want, s)
		}
	}
	for line := range strings.Lines(s) {
		if strings.HasSuffix(line, " \n") {
			t.Errorf("spaces at the end of %q", line)
		}
	}
	e.AheadBy = 12
	if s := e.String(); !strings.Contains(s, "runner-up: p/b, behind by 12 tokens") {
		t.Errorf("%s", s)
	}
}

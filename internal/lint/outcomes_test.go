package lint

import (
	"fmt"
	"strings"
	"testing"

	"kvgate/proxy"
)

// docs/outcomes.md is the table of the program.
func TestOutcomesAreDocumented(t *testing.T) {
	var b strings.Builder
	b.WriteString(`# Outcomes

<!-- Made by make generate from proxy/outcome.go. -->

Every request ends in one of these words. It is the ` + "`outcome`" + ` of the log line and of the metrics, the ` + "`code`" + ` of the error that
the client gets, and, where debugging is on, the header ` + "`X-Kvgate-Outcome`" + ` of answers that were there as a whole when their head
was sent. A stream has no such header: how it ends is not known when it begins, and the log and the metrics tell.

| outcome | status | error type | means |
|---|---|---|---|
`)
	seen := map[string]bool{}
	for o := range proxy.Outcomes {
		if o.String() == "" || seen[o.String()] || strings.ToLower(o.String()) != o.String() {
			t.Errorf("outcome %d: bad or repeated word %q", o, o)
		}
		seen[o.String()] = true
		status, typ := "as sent by the server", "-"
		if o.Status() != 0 {
			status = fmt.Sprint(o.Status())
		}
		switch o {
		case proxy.ClientGone:
			status += ", or as sent; in logs only"
		case proxy.EndpointStatus, proxy.OK:
		default:
			typ = "`" + o.ErrorType() + "`"
		}
		if m := o.Meaning(); !strings.HasSuffix(m, ".") {
			t.Errorf("outcome %s: its meaning is %q; want a sentence", o, m)
		}
		fmt.Fprintf(&b, "| `%s` | %s | %s | %s |\n", o, status, typ, o.Meaning())
	}
	generated(t, "docs/outcomes.md", b.String())
}

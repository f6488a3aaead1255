package top

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/gdamore/tcell/v2"
	"github.com/rivo/uniseg"

	"kvgate/internal/admin"
)

// A tone is what a text means; the terminal's own colors say the rest.
type tone int

const (
	plain tone = iota
	faint
	strong
	warn
	bad
	inverse
)

func (v *View) style(t tone) tcell.Style {
	s := tcell.StyleDefault
	switch t {
	case faint:
		return s.Dim(true)
	case strong:
		return s.Bold(true)
	case inverse:
		return s.Reverse(true)
	case warn:
		if v.o.Plain {
			return s.Bold(true)
		}
		return s.Foreground(tcell.ColorOlive).Bold(true)
	case bad:
		if v.o.Plain {
			return s.Bold(true).Reverse(true)
		}
		return s.Foreground(tcell.ColorMaroon).Bold(true)
	}
	return s
}

// A column is one of the endpoints' columns. from is the width of terminal from which on it is shown.
type column struct {
	name, head string
	width      int // 0: what is left
	from       int
	left       bool
	text       func(row) (string, tone)
	compare    func(a, b row) int
}

var columns = []column{
	{name: "endpoint", head: "ENDPOINT", left: true, text: func(r row) (string, tone) { return r.name, plain }, compare: func(a, b row) int { return strings.Compare(a.e.ID, b.e.ID) }},
	{name: "state", head: "STATE", width: 8, left: true, text: func(r row) (string, tone) {
		t := faint
		if !r.e.Healthy {
			t = bad
		} else if r.e.Error != "" || r.e.State[0] != "up" {
			t = warn
		}
		return strings.Join(r.e.State, ","), t
	}, compare: func(a, b row) int { return strings.Compare(strings.Join(a.e.State, ","), strings.Join(b.e.State, ",")) }},
	{name: "kv", head: "KV", width: 11, text: func(r row) (string, tone) { return bar(r.e.KV, 6), level(r.e.KV) }, compare: byPointer(func(r row) *float64 { return r.e.KV })},
	{name: "free", head: "FREE", width: 5, text: func(r row) (string, tone) { return count(r.e.KVHeadroom), plain }, compare: byPointer(func(r row) *int64 { return r.e.KVHeadroom })},
	{name: "pending", head: "PEND", width: 5, text: number(func(r row) int64 { return r.e.Pending }), compare: by(func(r row) int64 { return r.e.Pending })},
	{name: "ours", head: "OURS", width: 4, text: number(func(r row) int64 { return r.e.Requests }), compare: by(func(r row) int64 { return r.e.Requests })},
	{name: "running", head: "RUN", width: 4, text: func(r row) (string, tone) { return count(r.e.Running), zero(r.e.Running) }, compare: byPointer(func(r row) *int32 { return r.e.Running })},
	{name: "waiting", head: "WAIT", width: 4, text: func(r row) (string, tone) {
		if r.e.Waiting != nil && *r.e.Waiting > 0 {
			return count(r.e.Waiting), warn
		}
		return count(r.e.Waiting), faint
	}, compare: byPointer(func(r row) *int32 { return r.e.Waiting })},
	{name: "foreign", head: "FRGN", width: 4, text: func(r row) (string, tone) { return count(r.e.Foreign), zero(r.e.Foreign) }, compare: byPointer(func(r row) *int32 { return r.e.Foreign })},
	{name: "age", head: "AGE", width: 5, text: func(r row) (string, tone) {
		switch {
		case r.age < 0:
			return "never", warn
		case r.age >= 10:
			return seconds(&r.age), warn
		}
		return fmt.Sprintf("%.1fs", r.age), plain
	}, compare: by(func(r row) float64 { return r.age })},
	{name: "adapters", head: "ADAPTERS", width: 24, from: 110, left: true, text: func(r row) (string, tone) {
		var names []string
		for _, a := range r.e.Adapters {
			names = append(names, a.Name)
		}
		if len(names) == 0 {
			return unknown, faint
		}
		return strings.Join(names, " "), plain
	}, compare: by(func(r row) int { return len(r.e.Adapters) + r.e.MoreAdapters })},
	{name: "engines", head: "ENG", width: 3, from: 120, text: func(r row) (string, tone) { return fmt.Sprint(max(1, len(r.e.Engines))), faint }, compare: by(func(r row) int { return len(r.e.Engines) })},
	{name: "prefill", head: "PREFILL/S", width: 9, from: 130, text: func(r row) (string, tone) { return count(r.e.PrefillRate), plain }, compare: byPointer(func(r row) *float64 { return r.e.PrefillRate })},
}

func by[T cmp.Ordered](get func(row) T) func(a, b row) int {
	return func(a, b row) int { return cmp.Compare(get(a), get(b)) }
}

// byPointer puts what is unknown below everything.
func byPointer[T cmp.Ordered](get func(row) *T) func(a, b row) int {
	return func(a, b row) int {
		x, y := get(a), get(b)
		switch {
		case x == nil && y == nil:
			return 0
		case x == nil:
			return -1
		case y == nil:
			return 1
		}
		return cmp.Compare(*x, *y)
	}
}

func number(get func(row) int64) func(row) (string, tone) {
	return func(r row) (string, tone) {
		n := get(r)
		return count(&n), zero(&n)
	}
}

func zero[T int32 | int64](n *T) tone {
	if n == nil || *n == 0 {
		return faint
	}
	return plain
}

func level(kv *float64) tone {
	switch {
	case kv == nil:
		return faint
	case *kv >= 0.95:
		return bad
	case *kv >= 0.8:
		return warn
	}
	return plain
}

const unknown = "-"

// count is a number in at most five characters.
func count[T int32 | int64 | float64 | int | uint64](n *T) string {
	if n == nil {
		return unknown
	}
	v := float64(*n)
	switch {
	case v < 10 && v != float64(int64(v)):
		return fmt.Sprintf("%.1f", v)
	case v < 1e4:
		return fmt.Sprintf("%.0f", v)
	case v < 1e6:
		return fmt.Sprintf("%.0fk", v/1e3)
	case v < 1e7:
		return fmt.Sprintf("%.1fM", v/1e6)
	case v < 1e9:
		return fmt.Sprintf("%.0fM", v/1e6)
	}
	return fmt.Sprintf("%.1fG", v/1e9)
}

func seconds(s *float64) string {
	if s == nil {
		return unknown
	}
	switch v := *s; {
	case v < 0.001:
		return fmt.Sprintf("%.0fµs", v*1e6)
	case v < 0.01:
		return fmt.Sprintf("%.1fms", v*1e3)
	case v < 1:
		return fmt.Sprintf("%.0fms", v*1e3)
	case v < 100:
		return fmt.Sprintf("%.3gs", v)
	case v < 7200:
		return fmt.Sprintf("%.0fm", v/60)
	case v < 48*3600:
		return fmt.Sprintf("%.0fh", v/3600)
	default:
		return fmt.Sprintf("%.0fd", v/86400)
	}
}

func percent(v *float64) string {
	if v == nil {
		return unknown
	}
	return fmt.Sprintf("%.0f%%", *v*100)
}

// bar is a ratio as a bar of n characters and a number.
func bar(v *float64, n int) string {
	if v == nil {
		return unknown
	}
	const eighths = " ▏▎▍▌▋▊▉"
	parts := []rune(eighths)
	fill := min(max(int(*v*float64(8*n)+0.5), 0), 8*n)
	b := strings.Repeat("█", fill/8)
	if fill < 8*n {
		b += string(parts[fill%8]) + strings.Repeat(" ", n-fill/8-1)
	}
	return b + fmt.Sprintf("%5s", percent(v))
}

// fit cuts or pads text to width cells. An ellipsis says that it was cut; of an endpoint's name the end tells more.
func fit(text string, width int, left, keepEnd bool) string {
	clean := strings.Map(func(r rune) rune {
		if r < ' ' || r == 0x7f || r >= 0x80 && r < 0xa0 {
			return '?' // nobody's escape sequences reach the terminal
		}
		return r
	}, text)
	w := uniseg.StringWidth(clean)
	if w > width {
		runes := []rune(clean)
		for len(runes) > 0 && uniseg.StringWidth(string(runes)) > width-1 {
			if keepEnd {
				runes = runes[1:]
			} else {
				runes = runes[:len(runes)-1]
			}
		}
		if clean = string(runes) + "…"; keepEnd {
			clean = "…" + string(runes)
		}
		w = uniseg.StringWidth(clean)
	}
	pad := strings.Repeat(" ", max(0, width-w))
	if left {
		return clean + pad
	}
	return pad + clean
}

// A canvas is what is drawn on: a screen, or lines of text.
type canvas interface {
	put(x, y int, text string, t tone)
}

// A picture is put together before any of it goes to the screen: what is the same as before is then not sent again, which
// matters over SSH.
type picture struct {
	cells         []cell
	width, height int
}

type cell struct {
	text string
	tone tone
}

func (p *picture) put(x, y int, text string, t tone) {
	g := uniseg.NewGraphemes(text)
	for g.Next() {
		w := g.Width()
		if y < 0 || y >= p.height || x < 0 || x+w > p.width {
			return
		}
		p.cells[y*p.width+x] = cell{g.Str(), t}
		for i := 1; i < w; i++ {
			p.cells[y*p.width+x+i] = cell{}
		}
		x += max(1, w)
	}
}

// Draw draws on s.
func (v *View) Draw(s tcell.Screen) {
	w, h := s.Size()
	p := &picture{make([]cell, w*h), w, h}
	for i := range p.cells {
		p.cells[i].text = " "
	}
	v.draw(p, w, h)
	for i, c := range p.cells {
		if c.text != "" {
			r := []rune(c.text)
			s.SetContent(i%w, i/w, r[0], r[1:], v.style(c.tone))
		}
	}
}

func (v *View) draw(c canvas, width, height int) {
	line := func(y int, text string, t tone) { c.put(0, y, fit(text, width, true, false), t) }
	if v.live == nil {
		line(0, "kvgate top", strong)
		if v.err != nil {
			for i, l := range wrap(v.err.Error(), width) {
				line(2+i, l, bad)
			}
		} else {
			line(2, "looking…", faint)
		}
		return
	}
	y := v.header(c, width)
	if v.help {
		for i, l := range helpText {
			line(y+1+i, l, plain)
		}
		return
	}
	foot := "tab requests  / filter  ←→ sort  r reverse  enter open  p pause  ? help  q quit"
	if v.page == requests {
		foot = "tab endpoints  / filter  enter open  p pause  ? help  q quit"
	}
	switch {
	case v.detail != nil:
		for i := y; i < height-1 && v.top+i-y < len(v.detail); i++ {
			line(i, v.detail[v.top+i-y], plain)
		}
		foot = "↑↓ scroll  esc back  q quit"
	case v.page == endpoints:
		v.drawEndpoints(c, y, width, height-1)
	default:
		v.drawRequests(c, y, width, height-1)
	}
	if v.typing || v.filter != "" {
		foot = "filter: " + v.filter
		if v.typing {
			foot += "▏  enter keeps it, esc clears it"
		} else {
			foot += "   (/ changes it, esc clears it)"
		}
	}
	line(height-1, foot, inverse)
}

var helpText = []string{
	"/        filter by name, state or adapter: every word must be there",
	"tab      endpoints, or the last requests",
	"← → s    sort by another column; r turns the order round",
	"↑ ↓ j k  move; page up and down, home, end",
	"enter    of an endpoint: its last requests; of a request: why it went there",
	"p        pause",
	"esc      back, or no filter",
	"q        quit",
	"",
	"KV      share of the KV cache in use at the last scrape",
	"FREE    tokens free after bookings and foreign load",
	"PEND    uncached prompt tokens of ours before their first token",
	"OURS    requests of this gateway; FRGN: of others; RUN, WAIT: as the server said",
	"AGE     of what is known",
}

// header draws what is true of all, and returns the next line.
func (v *View) header(c canvas, width int) int {
	l := v.live
	status, t := "ready", strong
	if len(l.Gateway.Missing) > 0 {
		status, t = "not ready: "+strings.Join(l.Gateway.Missing, "; "), bad
	}
	if v.err != nil {
		status, t = "no answer, shown is from "+l.At.Local().Format(time.TimeOnly)+": "+v.err.Error(), bad
	} else if v.paused {
		status, t = "paused", warn
	}
	up := l.At.Sub(l.Gateway.StartedAt).Seconds()
	title := fmt.Sprintf("kvgate %s  up %s  %d endpoints  %s  ", l.Gateway.Version, seconds(&up), len(l.Endpoints), l.At.Local().Format(time.TimeOnly))
	c.put(0, 0, fit(title, width, true, false), strong)
	if x := len([]rune(title)); x < width {
		c.put(x, 0, fit(status, width-x, true, false), t)
	}
	f := l.Figures
	inFlight, requests := l.Gateway.InFlight, f.RequestsPerSecond
	c.put(0, 1, fit(fmt.Sprintf("%s/s  first token %s p50, %s p99  %s tok/s out  %s failed  %s in flight", count(&requests), seconds(f.TTFTP50), seconds(f.TTFTP99),
		count(f.OutputTokensPerSecond), percent(f.ErrorRatio), count(&inFlight)), width, true, false), plain)
	y := 2
	for i := range l.Pools {
		if y == 7 && len(l.Pools) > 5 {
			c.put(0, y, fit(fmt.Sprintf("and %d more pools", len(l.Pools)-5), width, true, false), faint)
			y++
			break
		}
		p := &l.Pools[i]
		up, all := 0, 0
		var used, capacity float64
		for j := range l.Endpoints {
			e := &l.Endpoints[j]
			if e.Pool != p.Name {
				continue
			}
			if all++; e.Healthy {
				up++
			}
			if e.KV != nil && e.KVCapacity != nil {
				used += *e.KV * float64(*e.KVCapacity)
				capacity += float64(*e.KVCapacity)
			}
		}
		var kv *float64
		if capacity > 0 {
			kv = new(used / capacity)
		}
		t := plain
		if up == 0 {
			t = bad
		}
		c.put(0, y, fit(fmt.Sprintf("%s %s %s kv %s %5s/s ttft %s prefix %s lora %s", fit(p.Name, 12+max(0, width-80), true, true), fit(p.Policy, 8, true, false), fit(fmt.Sprintf("%d/%d up", up, all), 8, true, false),
			fit(percent(kv), 4, false, false), count(&p.RequestsPerSecond), fit(seconds(p.TTFTP50), 6, false, false), fit(percent(p.PrefixHitRatio), 4, false, false), fit(percent(p.AdapterHitRatio), 4, false, false)), width, true, false), t)
		y++
	}
	if text := waiting(l.Waiting); text != "" {
		c.put(0, y, fit(text, width, true, false), warn)
		y++
	}
	return y
}

// waiting says in a line how many requests wait for admission, in which classes and whose; "" where none does.
func waiting(all []admin.WaitingView) string {
	var classes, tenants []string
	byClass, byTenant := map[string]int64{}, map[string]int64{}
	total, others := int64(0), int64(0)
	for i := range all {
		w := &all[i]
		if w.Waiting == 0 {
			continue
		}
		total += w.Waiting
		if byClass[w.Class] == 0 {
			classes = append(classes, w.Class)
		}
		byClass[w.Class] += w.Waiting
		for _, t := range w.Tenants {
			if t.Others > 0 || t.Tenant == "" {
				others += int64(t.Waiting)
				continue
			}
			if byTenant[t.Tenant] == 0 {
				tenants = append(tenants, t.Tenant)
			}
			byTenant[t.Tenant] += int64(t.Waiting)
		}
	}
	if total == 0 {
		return ""
	}
	slices.SortStableFunc(tenants, func(a, b string) int { return cmp.Compare(byTenant[b], byTenant[a]) })
	for i, c := range classes {
		classes[i] = fmt.Sprintf("%d %s", byClass[c], c)
	}
	for i, t := range tenants {
		tenants[i] = fmt.Sprintf("%s %d", t, byTenant[t])
	}
	if others > 0 && len(tenants) > 0 {
		tenants = append(tenants, fmt.Sprintf("others %d", others))
	}
	text := fmt.Sprintf("%d wait for admission: %s", total, strings.Join(classes, ", "))
	if len(tenants) > 0 {
		text += "  by tenant: " + strings.Join(tenants, ", ")
	}
	return text
}

// shown are the columns that a terminal of that width has room for, and the width of the first.
func shown(width int) (cols []int, first int) {
	first = width
	for i, c := range columns {
		if width >= c.from {
			cols = append(cols, i)
			first -= c.width + 1
		}
	}
	return cols, max(first+1, 8)
}

func (v *View) drawEndpoints(c canvas, y, width, bottom int) {
	rows := v.rows()
	cols, first := shown(width)
	x := 0
	for _, i := range cols {
		col := columns[i]
		w := cmp.Or(col.width, first)
		head, t := col.head, inverse
		if i == v.sort {
			if head += "↑"; v.down {
				head = col.head + "↓"
			}
		}
		c.put(x, y, fit(head, w, col.left, false)+" ", t)
		x += w + 1
	}
	y++
	if len(rows) == 0 {
		what := "no endpoint is known"
		if len(v.live.Endpoints) > 0 {
			what = fmt.Sprintf("none of %d endpoints matches", len(v.live.Endpoints))
		}
		c.put(0, y, what, faint)
		return
	}
	if v.pick != "" {
		for i := range rows {
			if rows[i].e.ID == v.pick {
				v.cursor = i
			}
		}
	}
	v.scroll(len(rows), bottom-y)
	for i := v.top; i < len(rows) && y < bottom; i++ {
		x := 0
		for _, k := range cols {
			col := columns[k]
			text, t := col.text(rows[i])
			w := cmp.Or(col.width, first)
			if i == v.cursor && k == 0 {
				t = inverse
			}
			c.put(x, y, fit(text, w, col.left, k == 0), t)
			x += w + 1
		}
		y++
	}
}

// scroll keeps the cursor within what is shown.
func (v *View) scroll(n, room int) {
	v.cursor = max(0, min(v.cursor, n-1))
	v.top = max(0, min(v.top, v.cursor, max(0, n-room)))
	if v.cursor >= v.top+room {
		v.top = v.cursor - room + 1
	}
}

func (v *View) drawRequests(c canvas, y, width, bottom int) {
	list := v.requests()
	const fixed = 8 + 1 + 16 + 1 + 7 + 1 + 7 + 1 + 5 + 2
	rest := max(16, width-fixed)
	model := rest * 2 / 5
	format := func(at, m, e, o, first, total, out string) string {
		return fit(at, 8, true, false) + " " + fit(m, model, true, true) + " " + fit(e, rest-model, true, true) + " " + fit(o, 16, true, false) + " " + fit(first, 7, false, false) + " " + fit(total, 7, false, false) + " " + fit(out, 5, false, false)
	}
	c.put(0, y, fit(format("ENDED", "MODEL", "ENDPOINT", "OUTCOME", "FIRST", "TOTAL", "OUT"), width, true, false), inverse)
	y++
	if len(list) == 0 {
		c.put(0, y, "no request to show", faint)
		return
	}
	v.scroll(len(list), bottom-y)
	for i := v.top; i < len(list) && y < bottom; i++ {
		d, t := list[i], plain
		if d.Outcome != "ok" && d.Outcome != "client_gone" {
			t = bad
		}
		if i == v.cursor {
			t = inverse
		}
		c.put(0, y, fit(format(d.At.Local().Format(time.TimeOnly), cmp.Or(d.Model, unknown), cmp.Or(d.Endpoint, unknown), d.Outcome, seconds(d.TTFTSeconds), seconds(&d.DurationSeconds), count(d.OutputTokens)), width, true, false), t)
		y++
	}
}

// Describe is a request as lines for people: where its time went, and why it went where it went.
func Describe(d *admin.DecisionView) []string {
	var out []string
	add := func(format string, args ...any) { out = append(out, fmt.Sprintf(format, args...)) }
	add("request %d  %s  %s", d.Number, d.RequestID, d.At.Local().Format(time.DateTime))
	add("%s -> %s: %s, status %d", cmp.Or(d.Model, d.Path), cmp.Or(d.Endpoint, "nowhere"), d.Outcome, d.Status)
	if d.Error != "" {
		add("%s", d.Error)
	}
	add("")
	part := func(name string, s float64) {
		if s > 0 {
			add("  %-34s %8s %4.0f%%", name, seconds(&s), 100*s/max(d.DurationSeconds, 1e-9))
		}
	}
	part("reading the request", d.ReadSeconds)
	part("waiting for admission", d.QueueSeconds)
	part("choosing", d.DecisionSeconds)
	if d.SentSeconds != nil {
		part("connecting, sending, other attempts", *d.SentSeconds-d.ReadSeconds-d.QueueSeconds-d.DecisionSeconds)
		if d.FirstByteSeconds != nil {
			part("server until its first token", *d.FirstByteSeconds-*d.SentSeconds)
			part("answering", d.DurationSeconds-*d.FirstByteSeconds)
		}
	}
	add("  %-34s %8s", "in all", seconds(&d.DurationSeconds))
	if d.PredictedSeconds != nil {
		add("  first token predicted after %s, came after %s", seconds(d.PredictedSeconds), seconds(d.AnsweredSeconds))
	}
	for i, a := range d.Attempts {
		add("  attempt %d: %s, %s, %s", i+1, a.Endpoint, a.Outcome, seconds(&a.Seconds))
	}
	add("")
	if d.Explanation == nil {
		add("its explanation was not kept")
		return out
	}
	return append(out, strings.Split(strings.TrimRight(d.Explanation.String(), "\n"), "\n")...)
}

func wrap(text string, width int) (lines []string) {
	for len(text) > 0 {
		n := min(len(text), max(width, 10))
		lines = append(lines, text[:n])
		text = text[n:]
	}
	return lines
}

// text is a canvas of lines.
type text struct{ lines []map[int]string }

func (c *text) put(x, y int, s string, _ tone) {
	for len(c.lines) <= y {
		c.lines = append(c.lines, map[int]string{})
	}
	c.lines[y][x] = s
}

// Text is the picture as lines of that width, with every endpoint, for a terminal that is none.
func (v *View) Text(width int) string {
	if v.live == nil {
		return ""
	}
	c := &text{}
	v.cursor = -1
	y := v.header(c, width)
	cols, first := shown(width)
	var b strings.Builder
	for _, l := range c.lines[:y] {
		s := l[0]
		for x, t := range l {
			if x > 0 { // the status, which follows the title
				s = string([]rune(s)[:x]) + t
			}
		}
		b.WriteString(strings.TrimRight(s, " ") + "\n")
	}
	print := func(get func(k int) string) {
		var parts []string
		for _, k := range cols {
			parts = append(parts, fit(get(k), cmp.Or(columns[k].width, first), columns[k].left, k == 0))
		}
		b.WriteString(strings.TrimRight(strings.Join(parts, " "), " ") + "\n")
	}
	print(func(k int) string { return columns[k].head })
	for _, r := range v.rows() {
		print(func(k int) string {
			t, _ := columns[k].text(r)
			return t
		})
	}
	return b.String()
}

// Package top shows a running gateway in a terminal, as the dashboard does in a browser: what kvgate top is. It draws on a
// tcell screen, asks through a function, and knows no HTTP.
package top

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
	"time"
	"unicode"

	"github.com/gdamore/tcell/v2"

	"kvgate/internal/admin"
)

// Options are what a View asks and how.
type Options struct {
	// Live asks for everything; required.
	Live func(context.Context) (*admin.LiveView, error)
	// Request asks for one remembered request, with its explanation if there is one; required.
	Request func(ctx context.Context, number uint64) (*admin.DecisionView, error)
	Every   time.Duration // between two looks; default 1 s
	Plain   bool          // no colors
	Sort    string        // the column to begin with; see Columns
	Filter  string        // … and the filter
}

// A View is the terminal's picture. It belongs to the goroutine that runs it.
type View struct {
	o    Options
	live *admin.LiveView
	err  error // of the last look

	page     page
	sort     int // of columns
	down     bool
	filter   string
	typing   bool
	paused   bool
	cursor   int // row of the list
	top      int // first row shown
	pick     string
	detail   []string // lines of one request; nil: the list is shown
	help     bool
	quitting bool
}

type page int

const (
	endpoints page = iota
	requests
)

// New returns a view that has not looked yet. It fails on a column that does not exist.
func New(o Options) (*View, error) {
	o.Every = cmp.Or(o.Every, time.Second)
	v := &View{o: o, filter: strings.ToLower(o.Filter)}
	if o.Sort != "" {
		i := slices.IndexFunc(columns, func(c column) bool { return c.name == strings.ToLower(o.Sort) })
		if i < 0 {
			return nil, fmt.Errorf("column %q; want one of %s", o.Sort, strings.Join(Columns(), ", "))
		}
		v.sort, v.down = i, i > 1
	}
	return v, nil
}

// Columns are the names of columns that can be sorted by.
func Columns() (names []string) {
	for _, c := range columns {
		names = append(names, c.name)
	}
	return names
}

// Run draws on s until ctx ends or somebody quits. The caller has initialised s and finishes it.
func (v *View) Run(ctx context.Context, s tcell.Screen) error {
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	events := make(chan tcell.Event, 16)
	quit := make(chan struct{})
	defer close(quit)
	go s.ChannelEvents(events, quit)

	type look struct {
		live *admin.LiveView
		err  error
	}
	looks := make(chan look, 1)
	looking := false
	begin := func() {
		if !looking {
			looking = true
			go func() {
				l, err := v.o.Live(ctx)
				looks <- look{l, err}
			}()
		}
	}
	begin()
	tick := time.NewTicker(v.o.Every)
	defer tick.Stop()
	for !v.quitting {
		v.Draw(s)
		s.Show()
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
			if !v.paused {
				begin()
			}
		case l := <-looks:
			looking = false
			v.Take(l.live, l.err)
		case ev, ok := <-events:
			if !ok {
				return nil
			}
			switch ev := ev.(type) {
			case *tcell.EventResize:
				s.Sync()
			case *tcell.EventKey:
				v.key(ctx, ev)
			}
		}
	}
	if looking {
		stop()
		<-looks
	}
	return nil
}

// Take takes in a look, or why there was none.
func (v *View) Take(l *admin.LiveView, err error) {
	if v.err = err; err == nil {
		v.live = l
	}
}

func (v *View) key(ctx context.Context, ev *tcell.EventKey) {
	if v.typing {
		switch ev.Key() {
		case tcell.KeyEnter:
			v.typing = false
		case tcell.KeyEscape, tcell.KeyCtrlC:
			v.typing, v.filter = false, ""
		case tcell.KeyBackspace, tcell.KeyBackspace2:
			if r := []rune(v.filter); len(r) > 0 {
				v.filter = string(r[:len(r)-1])
			}
		case tcell.KeyRune:
			if len(v.filter) < 60 && unicode.IsPrint(ev.Rune()) {
				v.filter += strings.ToLower(string(ev.Rune()))
			}
		}
		v.cursor, v.pick = 0, ""
		return
	}
	if ev.Key() == tcell.KeyCtrlC || ev.Key() == tcell.KeyRune && ev.Rune() == 'q' {
		v.quitting = true
		return
	}
	if v.help {
		v.help = false
		return
	}
	step := 0
	switch ev.Key() {
	case tcell.KeyEscape:
		if v.detail != nil {
			v.detail, v.top = nil, 0
		} else {
			v.filter = ""
		}
	case tcell.KeyUp:
		step = -1
	case tcell.KeyDown:
		step = 1
	case tcell.KeyPgUp:
		step = -15
	case tcell.KeyPgDn:
		step = 15
	case tcell.KeyHome:
		step = -1 << 20
	case tcell.KeyEnd:
		step = 1 << 20
	case tcell.KeyTab, tcell.KeyBacktab:
		v.page, v.cursor, v.top, v.pick, v.detail = 1-v.page, 0, 0, "", nil
	case tcell.KeyLeft:
		v.sort = (v.sort + len(columns) - 1) % len(columns)
	case tcell.KeyRight:
		v.sort = (v.sort + 1) % len(columns)
	case tcell.KeyEnter:
		v.open(ctx)
	case tcell.KeyRune:
		switch ev.Rune() {
		case '/':
			v.typing = true
		case 'k':
			step = -1
		case 'j':
			step = 1
		case 's':
			v.sort = (v.sort + 1) % len(columns)
		case 'r':
			v.down = !v.down
		case 'p', ' ':
			v.paused = !v.paused
		case '?', 'h':
			v.help = true
		}
	}
	if step != 0 && v.detail != nil {
		v.top = max(0, min(v.top+step, len(v.detail)-1))
		return
	}
	if step != 0 {
		v.move(step)
	}
}

// move moves the cursor, which stays on its endpoint while others come and go around it.
func (v *View) move(step int) {
	n := 0
	switch v.page {
	case endpoints:
		rows := v.rows()
		n = len(rows)
		if v.cursor = max(0, min(v.cursor+step, n-1)); n > 0 {
			v.pick = rows[v.cursor].e.ID
		}
	case requests:
		n = len(v.requests())
		v.cursor = max(0, min(v.cursor+step, n-1))
	}
}

// open shows one request, or the requests of one endpoint.
func (v *View) open(ctx context.Context) {
	if v.detail != nil {
		return
	}
	switch v.page {
	case endpoints:
		if rows := v.rows(); v.cursor < len(rows) {
			v.page, v.filter, v.cursor, v.top = requests, strings.ToLower(rows[v.cursor].e.ID), 0, 0
		}
	case requests:
		if list := v.requests(); v.cursor < len(list) {
			wait, cancel := context.WithTimeout(ctx, 5*time.Second)
			defer cancel()
			d, err := v.o.Request(wait, list[v.cursor].Number)
			if err != nil {
				v.detail = []string{err.Error()}
			} else {
				v.detail = Describe(d)
			}
			v.top = 0
		}
	}
}

// A row is an endpoint.
type row struct {
	e    *admin.LiveEndpoint
	name string  // its ID, without the pool where there is only one
	age  float64 // of what is known of it, in seconds; negative: it was never scraped
}

// rows are the endpoints shown, sorted.
func (v *View) rows() []row {
	if v.live == nil {
		return nil
	}
	var out []row
	for i := range v.live.Endpoints {
		e := &v.live.Endpoints[i]
		names := make([]string, 0, 8)
		for _, a := range e.Adapters {
			names = append(names, a.Name)
		}
		if !contains(v.filter, e.ID, e.URL, strings.Join(e.State, " "), e.Dialect, strings.Join(names, " ")) {
			continue
		}
		age := -1.0
		if i < len(v.live.Ages) {
			age = float64(v.live.Ages[i]) / 10
		}
		name := e.ID
		if len(v.live.Pools) == 1 {
			name = strings.TrimPrefix(name, e.Pool+"/")
		}
		out = append(out, row{e, name, age})
	}
	c := columns[v.sort]
	slices.SortStableFunc(out, func(a, b row) int {
		n := c.compare(a, b)
		if v.down {
			n = -n
		}
		return cmp.Or(n, strings.Compare(a.e.ID, b.e.ID))
	})
	return out
}

// requests are those shown, newest first.
func (v *View) requests() []*admin.DecisionView {
	if v.live == nil {
		return nil
	}
	var out []*admin.DecisionView
	for i := len(v.live.Requests) - 1; i >= 0; i-- {
		d := &v.live.Requests[i]
		if contains(v.filter, d.Model, d.Endpoint, d.Outcome, d.RequestID) {
			out = append(out, d)
		}
	}
	return out
}

// contains reports whether every word of filter is in one of the texts.
func contains(filter string, texts ...string) bool {
	all := strings.ToLower(strings.Join(texts, "\n"))
	for w := range strings.FieldsSeq(filter) {
		if !strings.Contains(all, w) {
			return false
		}
	}
	return true
}

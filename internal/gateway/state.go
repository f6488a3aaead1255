package gateway

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"time"

	"github.com/cespare/xxhash/v2"
	"go.uber.org/zap"

	"kvgate/pool"
	"kvgate/scoring"
)

// What the gateway knows and nobody can tell it anew is written to state.file when it stops, and taken up again when it
// starts: which prefixes and adapters it sent where, and what it learned of endpoints and models.
//
// The file is a line with the format's name and version, a line of JSON, the prefixes of the endpoints in the order of the
// JSON, and a checksum of all that.
const (
	stateMagic     = "kvgate-state 1\n"
	maxStateHeader = 64 << 20
	prefixSize     = 12 // place and age
	checksumSize   = 8
)

// savedState is the JSON of a state file.
type savedState struct {
	SavedAt      time.Time          `json:"saved_at"`
	IndexBuckets int                `json:"index_buckets"`
	Learned      []pool.LearnedView `json:"learned,omitempty"`
	Endpoints    []savedEndpoint    `json:"endpoints,omitempty"`
}

// savedEndpoint is what was known of an endpoint.
type savedEndpoint struct {
	Pool     string `json:"pool"`
	URL      string `json:"url"`
	SourceID string `json:"source_id,omitempty"`

	// By these its process is known again: when it started, in Unix seconds, and counters that only grow. 0 and negative
	// are unknown.
	StartTime        float64 `json:"start_time,omitempty"`
	PromptTokens     float64 `json:"prompt_tokens"`
	GenerationTokens float64 `json:"generation_tokens"`

	PrefillTokensPerSecond float64               `json:"prefill_tokens_per_second,omitempty"`
	Learned                *pool.LearnedEndpoint `json:"learned,omitempty"`
	PlacedAdapters         []pool.PlacedAdapter  `json:"placed_adapters,omitempty"`
	Prefixes               int                   `json:"prefixes,omitempty"` // entries that follow the JSON

	prefixes []scoring.SavedPrefix
}

// id is what makes an endpoint of the file one of the table.
func (e *savedEndpoint) id() [3]string { return [3]string{e.Pool, e.URL, e.SourceID} }

// sameProcess reports whether what is scraped now is of the process that was saved, and how many tokens it has taken in
// since. One that tells neither its start nor how much it has done is taken for another.
func (e *savedEndpoint) sameProcess(l *pool.Load) (since int64, same bool) {
	const marginSeconds = 2 // some servers derive the start from the uptime of the page
	if e.StartTime > 0 && l.StartTime > 0 {
		if math.Abs(e.StartTime-l.StartTime) > marginSeconds {
			return 0, false
		}
		same = true
	}
	for _, c := range [...]struct{ was, is float64 }{{e.PromptTokens, l.PromptTokens}, {e.GenerationTokens, l.GenerationTokens}} {
		if c.was < 0 || c.is < 0 {
			continue
		}
		if c.is < c.was {
			return 0, false
		}
		same = same || c.was > 0
		since += int64(min(c.is-c.was, 1e12))
	}
	return since, same
}

// saveState writes the state file. An error leaves an earlier file as it was.
func (g *Gateway) saveState() error {
	cfg := &g.cfg.Load().State
	if cfg.File == "" {
		return nil
	}
	s, now := g.table.Load(), g.now()
	st := savedState{SavedAt: time.Now().UTC(), IndexBuckets: g.index.Buckets(), Learned: g.learned(s)}
	prefixes := g.index.Save(s)
	for i := range s.Rows {
		r := &s.Rows[i]
		e := r.Endpoint
		st.Endpoints = append(st.Endpoints, savedEndpoint{
			Pool: e.Pool, URL: e.URL, SourceID: e.SourceID,
			StartTime: r.Load.StartTime, PromptTokens: r.Load.PromptTokens, GenerationTokens: r.Load.GenerationTokens,
			PrefillTokensPerSecond: e.PrefillTokensPerSecond.Load(), Learned: r.LearnedView(),
			PlacedAdapters: r.PlacedAdapters(now), Prefixes: len(prefixes[i]),
		})
	}
	head, err := json.Marshal(&st)
	if err != nil {
		return err
	}
	b := append(append([]byte(stateMagic), head...), '\n')
	for _, list := range prefixes {
		for _, p := range list {
			b = binary.LittleEndian.AppendUint64(b, p.Place)
			b = binary.LittleEndian.AppendUint32(b, p.Age)
		}
	}
	b = withChecksum(b)
	if err := writeWhole(cfg.File, b); err != nil {
		return err
	}
	g.log.Info("state saved", zap.String("file", cfg.File), zap.Int("bytes", len(b)), zap.Int("endpoints", len(st.Endpoints)))
	return nil
}

// withChecksum appends to b what parseState wants at its end.
func withChecksum(b []byte) []byte { return binary.LittleEndian.AppendUint64(b, xxhash.Sum64(b)) }

// writeWhole replaces the file by one with these bytes, or fails and leaves it.
func writeWhole(name string, b []byte) error {
	f, err := os.CreateTemp(filepath.Dir(name), "."+filepath.Base(name)+".*")
	if err != nil {
		return err
	}
	_, err = f.Write(b)
	err = errors.Join(err, f.Sync(), f.Close())
	if err == nil {
		err = os.Rename(f.Name(), name)
	}
	if err != nil {
		_ = os.Remove(f.Name())
	}
	return err
}

// readState reads a state file. No file is no state and no error.
func readState(name string, maxBytes int64) (*savedState, error) {
	fi, err := os.Stat(name)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	switch {
	case err != nil:
		return nil, err
	case !fi.Mode().IsRegular():
		return nil, fmt.Errorf("%s is no regular file", name)
	case fi.Size() > maxBytes:
		return nil, fmt.Errorf("%d bytes; want at most %d", fi.Size(), maxBytes)
	}
	b, err := os.ReadFile(name)
	if err != nil {
		return nil, err
	}
	return parseState(b)
}

// parseState reads the bytes of a state file.
func parseState(b []byte) (*savedState, error) {
	rest, ok := bytes.CutPrefix(b, []byte(stateMagic))
	if !ok {
		return nil, fmt.Errorf("it begins with %q; want %q", b[:min(len(b), len(stateMagic))], stateMagic)
	}
	if len(rest) < checksumSize {
		return nil, errors.New("it is cut off")
	}
	end := len(b) - checksumSize
	if got, want := xxhash.Sum64(b[:end]), binary.LittleEndian.Uint64(b[end:]); got != want {
		return nil, fmt.Errorf("its checksum is %016x; it says %016x", got, want)
	}
	head, rest, ok := bytes.Cut(rest[:len(rest)-checksumSize], []byte("\n"))
	if !ok || len(head) > maxStateHeader {
		return nil, errors.New("its header does not end")
	}
	st := new(savedState)
	if err := json.Unmarshal(head, st); err != nil {
		return nil, err
	}
	for i := range st.Endpoints {
		e := &st.Endpoints[i]
		if e.Prefixes < 0 || e.Prefixes > len(rest)/prefixSize {
			return nil, fmt.Errorf("endpoint %s: %d prefixes; there are %d bytes of them", e.URL, e.Prefixes, len(rest))
		}
		for range e.Prefixes {
			e.prefixes = append(e.prefixes, scoring.SavedPrefix{Place: binary.LittleEndian.Uint64(rest), Age: binary.LittleEndian.Uint32(rest[8:])})
			rest = rest[prefixSize:]
		}
	}
	if len(rest) > 0 {
		return nil, fmt.Errorf("%d bytes are left over", len(rest))
	}
	return st, nil
}

// loadState reads the state file, if there is one that is to be believed. What was learned of models is taken over at
// once, the rest when each endpoint has shown that it is the one that was saved.
func (g *Gateway) loadState() {
	cfg := g.cfg.Load()
	if cfg.State.File == "" {
		return
	}
	field := zap.String("file", cfg.State.File)
	// As much as an index of this size can need, and its header.
	st, err := readState(cfg.State.File, 2*int64(cfg.Limits.PrefixIndexBytes)+maxStateHeader)
	if err != nil {
		g.log.Warn("state file not used; starting without knowledge", field, zap.Error(err))
		return
	}
	if st == nil {
		return
	}
	if age := time.Since(st.SavedAt); age < -time.Minute || age > cfg.State.MaxAge {
		g.log.Info("state file not used: it is too old", field, zap.Duration("age_seconds", age.Round(time.Second)), zap.Duration("max_age_seconds", cfg.State.MaxAge))
		return
	}
	g.reloading.Lock()
	for i := range st.Learned {
		if l := g.learners[st.Learned[i].Pool]; l != nil {
			l.Restore(&st.Learned[i])
		}
	}
	g.reloading.Unlock()
	g.taking.Lock()
	defer g.taking.Unlock()
	g.saved = make(map[[3]string]*savedEndpoint, len(st.Endpoints))
	for i := range st.Endpoints {
		e := &st.Endpoints[i]
		if st.IndexBuckets != g.index.Buckets() {
			e.prefixes = nil
		}
		g.saved[e.id()] = e
	}
	g.savedAt = st.SavedAt
}

// learned is what has been learned of the models that s serves.
func (g *Gateway) learned(s *pool.Snapshot) (out []pool.LearnedView) {
	g.reloading.Lock()
	defer g.reloading.Unlock()
	for i := range s.Pools {
		if l := g.learners[s.Pools[i].Name]; l != nil {
			out = append(out, l.View(s.Pools[i].Name, s))
		}
	}
	return out
}

// takeUpState gives endpoints that have been scraped by now what was saved of them.
func (g *Gateway) takeUpState() {
	g.taking.Lock()
	defer g.taking.Unlock()
	if len(g.saved) == 0 {
		return
	}
	if time.Since(g.savedAt) > g.cfg.Load().State.MaxAge {
		g.saved = nil // those that are still missing come too late
		return
	}
	s, now := g.table.Load(), g.now()
	idle := time.Since(g.savedAt).Seconds()
	for i := range s.Rows {
		r := &s.Rows[i]
		id := [3]string{r.Endpoint.Pool, r.Endpoint.URL, r.Endpoint.SourceID}
		e := g.saved[id]
		if e == nil || r.ScrapedAt == 0 {
			continue
		}
		delete(g.saved, id)
		r.Endpoint.Relearn(e.PrefillTokensPerSecond, e.Learned)
		since, same := e.sameProcess(r.Load)
		if same {
			for j := range e.PlacedAdapters {
				e.PlacedAdapters[j].IdleSeconds += idle
			}
			r.Endpoint.Remember(e.PlacedAdapters, now, false)
			g.index.Restore(r, e.prefixes, since)
		}
		g.log.Info("state taken up", zap.String("endpoint", r.Endpoint.ID), zap.Bool("same_process", same), zap.Int("prefixes", len(e.prefixes)),
			zap.Int("adapters", len(e.PlacedAdapters)), zap.Int64("tokens_since", since))
	}
}

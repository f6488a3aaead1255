package modelsim

import (
	"sync"
	"sync/atomic"
	"time"
)

// process is what a restart loses: the engine with its caches, the adapters
// loaded at run time, the stored responses, the counters. One goroutine drives
// its engine.
type process struct {
	s       *Server
	started time.Time
	wake    chan struct{} // capacity 1: the engine has work, or less of it
	stop    chan struct{}
	stopped chan struct{}
	ending  sync.Once

	mu        sync.Mutex // guards what follows; the loop holds it in Advance
	eng       *Engine
	adapters  []adapter // servable, in the order of registration
	names     []string  // adapter names by engine number; numbers are not reused
	sleep     int       // sleep level, 0 awake
	dead      bool      // the engine has died, the API server has not noticed
	calls     map[*call]struct{}
	responses responseStore
	page      pageState

	updates sync.Mutex         // SGLang loads and unloads one adapter at a time
	evicted map[string]adapter // SGLang's, by name: loaded once, and again when asked for
}

type adapter struct {
	name, path string
	number     int32
	pinned     bool
}

// call is one HTTP request's work in the engine: a sequence for each choice.
type call struct {
	notify chan struct{} // capacity 1: some sequence made progress or ended
	seqs   []sequence
}

// sequence is one engine request, and what the handler reads of it without the
// process's lock.
type sequence struct {
	req      Request
	call     *call
	answer   answer
	capped   bool // ends at the caller's token limit rather than by itself
	produced atomic.Int32
	ended    atomic.Int32 // a State, 0 while it runs
	lastAt   time.Duration
	sent     int // the handler's: tokens written, the one under way included
	closed   bool
}

func (s *Server) newProcess() (*process, error) {
	p := &process{
		s: s, started: time.Now(),
		wake: make(chan struct{}, 1), stop: make(chan struct{}), stopped: make(chan struct{}),
		names: []string{""}, calls: make(map[*call]struct{}),
	}
	opt := s.engineOptions
	opt.Hooks = Hooks{
		FirstToken: p.firstToken, Token: p.token, Finished: p.finished,
		Step: func(i StepInfo) { s.surface.step(p, i) },
	}
	eng, err := NewEngine(opt)
	if err != nil {
		return nil, err
	}
	p.eng = eng
	for _, name := range s.opt.Adapters {
		p.register(name, "/adapters/"+name)
	}
	p.page.init()
	s.surface.step(p, StepInfo{})
	go p.loop()
	return p, nil
}

// register makes an adapter servable and returns its engine number.
func (p *process) register(name, path string) int32 {
	n := int32(len(p.names))
	p.names = append(p.names, name)
	p.adapters = append(p.adapters, adapter{name: name, path: path, number: n})
	return n
}

func (p *process) adapter(name string) (adapter, bool) {
	for _, a := range p.adapters {
		if a.name == name {
			return a, true
		}
	}
	return adapter{}, false
}

// now is the engine's time. The lock must be held, so that it never runs
// backwards between two calls of the engine.
func (p *process) now() time.Duration {
	return time.Duration(float64(time.Since(p.started)) * p.s.opt.Speedup)
}

// wall converts engine time to what a clock on the wall shows.
func (p *process) wall(d time.Duration) float64 { return d.Seconds() / p.s.opt.Speedup }

// loop moves the engine along with the wall clock, sleeping from step to step.
func (p *process) loop() {
	defer close(p.stopped)
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		p.mu.Lock()
		p.eng.Advance(p.now())
		at, ok := p.eng.NextEvent()
		wait := time.Duration(float64(at-p.now()) / p.s.opt.Speedup)
		p.mu.Unlock()
		if ok {
			timer.Reset(max(0, wait))
		} else {
			timer.Stop()
		}
		select {
		case <-p.stop:
			return
		case <-p.wake:
		case <-timer.C:
		}
	}
}

func (p *process) nudge() {
	select {
	case p.wake <- struct{}{}:
	default:
	}
}

// submit hands a call to the engine.
func (p *process) submit(c *call) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	now := p.now()
	if most := p.s.opt.MaxQueued; most > 0 && p.eng.queued() >= most {
		return queueFull
	}
	for i := range c.seqs {
		if err := p.eng.Submit(&c.seqs[i].req, now); err != nil {
			for j := range i {
				p.eng.Abort(&c.seqs[j].req, now)
			}
			return err
		}
	}
	p.calls[c] = struct{}{}
	p.nudge()
	return nil
}

// abort takes a call out of the engine.
func (p *process) abort(c *call) {
	p.mu.Lock()
	p.abortLocked(c)
	p.mu.Unlock()
	p.nudge()
}

func (p *process) abortLocked(c *call) {
	now := p.now()
	for i := range c.seqs {
		p.eng.Abort(&c.seqs[i].req, now)
	}
}

// forget drops the books of a call whose handler is done with it.
func (p *process) forget(c *call) {
	p.mu.Lock()
	delete(p.calls, c)
	p.mu.Unlock()
}

func (p *process) firstToken(r *Request, at time.Duration) {
	if _, ok := r.Tag.(*sequence); ok {
		p.page.ttft.observe(p.wall(at - r.SubmittedAt))
		p.page.queue.observe(p.wall(r.AdmittedAt - r.SubmittedAt))
	}
}

func (p *process) token(r *Request, at time.Duration) {
	q, ok := r.Tag.(*sequence)
	if !ok {
		return
	}
	if r.Generated > 1 {
		p.page.itl.observe(p.wall(at - q.lastAt))
	}
	q.lastAt = at
	q.produced.Store(int32(r.Generated))
	q.call.signal()
}

func (p *process) finished(r *Request, at time.Duration) {
	q, ok := r.Tag.(*sequence)
	if !ok {
		p.refill(r, at)
		return
	}
	switch {
	case r.State == StateAborted:
		p.page.aborted++
	case q.capped:
		p.page.byLength++
	default:
		p.page.byStop++
	}
	if r.State == StateFinished {
		p.page.e2e.observe(p.wall(at - r.SubmittedAt))
		p.page.promptTokens.observe(float64(r.PromptTokens))
		p.page.generatedTokens.observe(float64(r.Generated))
	}
	q.ended.Store(int32(r.State))
	q.call.signal()
}

func (c *call) signal() {
	select {
	case c.notify <- struct{}{}:
	default:
	}
}

// end stops the loop for good; handlers see their connections close.
func (p *process) end() {
	p.ending.Do(func() { close(p.stop) })
	<-p.stopped
}

// fillSequenceTokens is about how much KV one background request holds.
const fillSequenceTokens = 8192

// addFill loads background requests until they hold fraction of the KV cache.
// They are spread over their lives, and each starts again when it ends, so their
// share stays where it was put within a few percent.
func (p *process) addFill(fraction float64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	want := int(fraction * float64(p.eng.KVTokens()))
	n := max(1, (want+fillSequenceTokens-1)/fillSequenceTokens)
	size := min(want/n, p.s.maxModelTokens-1)
	now := p.now()
	for i := range n {
		// A life goes from 0.9 to 1.1 of size; this one is at i/n of it.
		life := max(2, size/5)
		grown := life * i / n
		r := &Request{PromptTokens: max(1, size*9/10+grown), OutputTokens: max(1, life-grown), Tag: fillTag(size)}
		p.number(r)
		ok, err := p.eng.Preload(r, now)
		if err != nil || !ok {
			// No room at once (other work, or a step under way): queue it.
			r.State = StateNew
			if p.eng.Submit(r, now) != nil {
				break
			}
		}
	}
	p.nudge()
}

// fillTag marks a background request with the mean size of its life.
type fillTag int

// number gives a background request a prompt of its own.
func (p *process) number(r *Request) {
	r.ID = p.s.sequence.Add(1)
	r.Blocks = r.Blocks[:0]
	for i := range r.PromptTokens / p.eng.kv.promptTokens {
		r.Blocks = append(r.Blocks, mix(r.ID<<20+uint64(i)))
	}
}

// refill starts a background request over when it has ended.
func (p *process) refill(r *Request, at time.Duration) {
	size, ok := r.Tag.(fillTag)
	if !ok || r.State != StateFinished {
		return
	}
	r.Reset()
	r.PromptTokens, r.OutputTokens = max(1, int(size)*9/10), max(2, int(size)/5)
	r.Blocks = r.Blocks[:min(len(r.Blocks), r.PromptTokens/p.eng.kv.promptTokens)]
	_ = p.eng.Submit(r, at) // it fitted before and is no larger now
}

// Package redisstore shares what has been used of limits between gateways, through Redis or Valkey: one round trip a request,
// with a short timeout, and none while the server is known to be away.
package redisstore

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/logging"

	"kvgate/internal/quota"
)

// Options are what a Store is made of.
type Options struct {
	URL string // of one server: redis://user:password@host:6379/0, rediss:// or unix://
	// Addresses are nodes of a cluster instead, or with Master the sentinels that know it by this name; Username, Password and
	// TLS are for the servers then.
	Addresses          []string
	Master             string
	Username, Password string
	TLS                *tls.Config

	Timeout time.Duration // of one look, connecting included; default 50 ms
	Prefix  string        // of its keys
	// OnState is told when the server can't be asked any more, and when it can again. It must not block. May be nil.
	OnState func(up bool, err error)
}

const (
	// lookAgain is the time between two looks at a server that is away; it doubles up to maxLookAgain.
	lookAgain    = 50 * time.Millisecond
	maxLookAgain = 2 * time.Second
	// maxWaiting bounds the corrections that wait to be sent.
	maxWaiting = 1 << 14
	// maxBatch is how many are sent at a time.
	maxBatch = 256
	// closeWait is how long the last ones may take.
	closeWait = 2 * time.Second
)

// Arrival times are kept in microseconds since 2026, so that the doubles of Lua hold them to a nanosecond or so, by the
// server's own clock: those of the gateways may differ.
const clock = `
local t = redis.call('TIME')
local now = (tonumber(t[1]) - 1767225600) * 1000000 + tonumber(t[2])
local function put(key, tat)
	if tat <= now then
		redis.call('DEL', key)
	else
		redis.call('SET', key, string.format('%.3f', tat), 'PX', math.ceil((tat - now) / 1000) + 1)
	end
end
`

// take moves all arrival times on or none. ARGV holds the increment and the window of each key. It returns the number of the
// first key that does not fit, from 1, or 0, and then how far ahead each arrival time lies, in nanoseconds.
var take = redis.NewScript(clock + `
local tat, refused = {}, 0
for i, key in ipairs(KEYS) do
	tat[i] = math.max(tonumber(redis.call('GET', key) or '0'), now)
	local inc = tonumber(ARGV[2 * i - 1])
	if refused == 0 and inc > 0 and tat[i] + inc - now > tonumber(ARGV[2 * i]) then
		refused = i
	end
end
local out = {refused}
for i, key in ipairs(KEYS) do
	if refused == 0 then
		tat[i] = tat[i] + tonumber(ARGV[2 * i - 1])
		put(key, tat[i])
	end
	out[i + 1] = string.format('%.0f', (tat[i] - now) * 1000)
end
return out
`)

// add moves arrival times by the increments in ARGV, either way.
var add = redis.NewScript(clock + `
for i, key in ipairs(KEYS) do
	local tat, inc = tonumber(redis.call('GET', key) or '0'), tonumber(ARGV[i])
	if inc > 0 then
		tat = math.max(tat, now)
	end
	put(key, tat + inc)
end
return 0
`)

// A Store is a quota.Store on a server. Make it with New; Close ends it.
type Store struct {
	o       Options
	client  redis.UniversalClient
	cluster bool // keys with different tags may be on different servers
	away    atomic.Bool
	wake    chan struct{} // the server has just been found away
	waiting chan quota.Op
	ctx     context.Context
	stop    context.CancelFunc
	wg      sync.WaitGroup
	start   sync.Once
	lost    atomic.Int64 // corrections that were not sent
}

// errAway is why nothing was asked.
var errAway = errors.New("the server is away")

func init() {
	logging.Disable() // it would write to standard error what OnState tells
}

// New returns a store. It asks nobody before it is used.
func New(o Options) (*Store, error) {
	if o.Timeout == 0 {
		o.Timeout = 50 * time.Millisecond
	}
	if o.OnState == nil {
		o.OnState = func(bool, error) {}
	}
	s := &Store{o: o, wake: make(chan struct{}, 1), waiting: make(chan quota.Op, maxWaiting)}
	if len(o.Addresses) > 0 {
		s.cluster = o.Master == ""
		s.client = redis.NewUniversalClient(&redis.UniversalOptions{
			Addrs: o.Addresses, MasterName: o.Master, IsClusterMode: s.cluster, Username: o.Username, Password: o.Password, TLSConfig: o.TLS,
			DialTimeout: o.Timeout, ReadTimeout: o.Timeout, WriteTimeout: o.Timeout, PoolTimeout: o.Timeout,
			ContextTimeoutEnabled: true, MaxRetries: -1, DialerRetries: 1,
		})
	} else {
		ro, err := redis.ParseURL(o.URL)
		if err != nil {
			return nil, errors.New("not the URL of a Redis server") // the error may hold the password
		}
		ro.DialTimeout, ro.ReadTimeout, ro.WriteTimeout, ro.PoolTimeout = o.Timeout, o.Timeout, o.Timeout, o.Timeout
		ro.ContextTimeoutEnabled = true
		ro.MaxRetries = -1
		ro.DialerRetries = 1
		s.client = redis.NewClient(ro)
	}
	s.ctx, s.stop = context.WithCancel(context.Background())
	return s, nil
}

// Take implements [quota.Store].
func (s *Store) Take(ops []quota.Op, tats []int64) (refused int, err error) {
	s.begin()
	if s.away.Load() {
		return 0, errAway
	}
	ctx, cancel := context.WithTimeout(s.ctx, s.o.Timeout)
	defer cancel()
	keys, args := make([]string, len(ops)), make([]any, 0, 2*len(ops))
	for i := range ops {
		keys[i] = s.key(&ops[i])
		args = append(args, micros(ops[i].Inc), micros(ops[i].Window))
	}
	out, err := take.Run(ctx, s.client, keys, args...).Slice()
	if err == nil && len(out) != len(ops)+1 {
		err = fmt.Errorf("%d values; want %d", len(out), len(ops)+1)
	}
	if err != nil {
		s.failed(err)
		return 0, err
	}
	for i := range ops {
		text, _ := out[i+1].(string)
		if tats[i], err = strconv.ParseInt(text, 10, 64); err != nil {
			return 0, err
		}
	}
	n, _ := out[0].(int64)
	return int(n) - 1, nil
}

// Add implements [quota.Store].
func (s *Store) Add(ops []quota.Op) {
	s.begin()
	for _, op := range ops {
		select {
		case s.waiting <- op:
		default:
			s.lost.Add(1)
		}
	}
}

// key is where op's arrival time is. What is in braces decides on which server of a cluster: the script of a request must find
// all of its keys on one, and they have the same tag.
func (s *Store) key(op *quota.Op) string {
	return s.o.Prefix + "{" + strconv.FormatUint(op.Tag, 16) + "}" + op.Kind.String() + "|" + op.ID
}

func micros(ns int64) string { return strconv.FormatFloat(float64(ns)/1000, 'f', 3, 64) }

// failed notes that the server can't be asked.
func (s *Store) failed(err error) {
	if s.ctx.Err() != nil || s.away.Swap(true) {
		return
	}
	s.o.OnState(false, err)
	select {
	case s.wake <- struct{}{}:
	default:
	}
}

// begin starts the goroutine that sends corrections and looks for a server that is away, once.
func (s *Store) begin() { s.start.Do(func() { s.wg.Go(s.run) }) }

func (s *Store) run() {
	for {
		select {
		case <-s.wake:
			s.awaitServer()
		case op := <-s.waiting:
			if s.away.Load() {
				s.lost.Add(1) // what it is about will have come back by itself when the window is over
				continue
			}
			s.send(context.Background(), op) // to its end, also when the store is closed meanwhile
		case <-s.ctx.Done():
			return
		}
	}
}

// awaitServer looks for the server until it answers.
func (s *Store) awaitServer() {
	for pause := lookAgain; ; pause = min(2*pause, maxLookAgain) {
		select {
		case <-time.After(pause):
		case <-s.ctx.Done():
			return
		}
		ctx, cancel := context.WithTimeout(s.ctx, s.o.Timeout)
		err := s.client.Ping(ctx).Err()
		cancel()
		if err == nil {
			s.away.Store(false)
			s.o.OnState(true, nil)
			return
		}
	}
}

// send sends op and whatever else waits.
func (s *Store) send(ctx context.Context, op quota.Op) {
	ops := []quota.Op{op}
	for len(ops) < maxBatch {
		select {
		case op := <-s.waiting:
			ops = append(ops, op)
			continue
		default:
		}
		break
	}
	if s.cluster {
		slices.SortStableFunc(ops, func(a, b quota.Op) int { return cmp.Compare(a.Tag, b.Tag) })
	}
	for len(ops) > 0 {
		n := len(ops)
		if s.cluster { // those of one server at a time
			n = 1
			for n < len(ops) && ops[n].Tag == ops[0].Tag {
				n++
			}
		}
		s.sendSome(ctx, ops[:n])
		ops = ops[n:]
	}
}

func (s *Store) sendSome(ctx context.Context, ops []quota.Op) {
	if s.away.Load() {
		s.lost.Add(int64(len(ops)))
		return
	}
	keys, args := make([]string, len(ops)), make([]any, len(ops))
	for i := range ops {
		keys[i], args[i] = s.key(&ops[i]), micros(ops[i].Inc)
	}
	ctx, cancel := context.WithTimeout(ctx, max(s.o.Timeout, 500*time.Millisecond)) // nobody waits for it
	defer cancel()
	if err := add.Run(ctx, s.client, keys, args...).Err(); err != nil {
		s.lost.Add(int64(len(keys)))
		s.failed(err)
	}
}

// Close sends what waits and ends the store.
func (s *Store) Close() {
	s.start.Do(func() {}) // it is not to begin any more
	s.stop()
	s.wg.Wait()
	ctx, cancel := context.WithTimeout(context.Background(), closeWait)
	defer cancel()
	for !s.away.Load() && ctx.Err() == nil {
		select {
		case op := <-s.waiting:
			s.send(ctx, op)
			continue
		default:
		}
		break
	}
	_ = s.client.Close()
}

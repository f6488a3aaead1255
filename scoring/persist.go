package scoring

import (
	"kvgate/pool"
)

// A SavedPrefix is one entry of an [Index] outside of it: where in the table it is, and how many tokens its endpoint has
// taken in since. It means something only in a table of the same size.
type SavedPrefix struct {
	Place uint64 // bucket and tag
	Age   uint32 // in units of stampTokens
}

// maxSavedPrefixes bounds what is saved of one endpoint: a cache of 100 million tokens in blocks of a hundred.
const maxSavedPrefixes = 1 << 20

// Buckets tells tables of different sizes apart.
func (x *Index) Buckets() int { return len(x.buckets) }

// Save returns, by row of s, the entries that its endpoint is believed to hold still. Others may write meanwhile.
func (x *Index) Save(s *pool.Snapshot) [][]SavedPrefix {
	out := make([][]SavedPrefix, len(s.Rows))
	now := make([]match, len(s.Rows))
	for i := range s.Rows {
		now[i].at(&s.Rows[i])
	}
	for i := range len(x.buckets) * bucketWords {
		w := x.buckets[i/bucketWords][i%bucketWords].Load()
		if w == 0 {
			continue
		}
		row := s.RowOf(uint16(w >> ownerShift))
		if row < 0 || w>>ownerShift&ownerMask != now[row].owner || len(out[row]) == maxSavedPrefixes {
			continue
		}
		if age := now[row].age(w); age <= now[row].limit {
			out[row] = append(out[row], SavedPrefix{uint64(i/bucketWords)<<tagBits | w>>tagShift, uint32(age)})
		}
	}
	return out
}

// Restore puts entries back for r's endpoint, which has taken in since tokens more. Entries that can't be are left out.
func (x *Index) Restore(r *pool.Row, entries []SavedPrefix, since int64) {
	var m match
	m.at(r)
	x.tick(r, &m)
	older := uint64(max(since, 0)) / stampTokens
	for _, e := range entries {
		bucket, t, age := e.Place>>tagBits, e.Place&(1<<tagBits-1), uint64(e.Age)+older
		if bucket >= uint64(x.Buckets()) || t == 0 || age > m.limit {
			continue
		}
		b := &x.buckets[bucket]
		b[x.place(b, t<<(slotBits+epochBits)|m.owner)].Store(t<<tagShift | m.owner<<ownerShift | (m.clock-age)&stampMask)
	}
}

// place is where in b an entry with the key goes: where it is, where there is room, or else in place of the oldest.
func (x *Index) place(b *bucket, key uint64) uint64 {
	free := -1
	for i := range b {
		switch w := b[i].Load(); {
		case w>>ownerShift == key:
			return uint64(i)
		case w == 0 && free < 0:
			free = i
		}
	}
	if free >= 0 {
		return uint64(free)
	}
	victim, _ := x.victim(b, key)
	return victim
}

// View returns what l has learned of the models that s serves in the pool.
func (l *Learner) View(pl string, s *pool.Snapshot) pool.LearnedView {
	v := pool.LearnedView{
		Pool:                   pl,
		WorkTokens:             l.newTokens.Load(),
		RequestSeconds:         l.seconds.Load(),
		PrefillTokensPerSecond: l.rate.Load(),
		BytesPerToken:          l.rest.bytesPerToken.Load(),
		OutputTokens:           l.rest.outputTokens.Load(),
	}
	index := s.Pool(pl)
	for t := range s.Targets() {
		if int(t.Pool) != index {
			continue
		}
		if m := l.model(t.Hash); m != &l.rest && m.seen.Load() > 0 {
			v.Models = append(v.Models, pool.LearnedModel{ID: t.Name, BytesPerToken: m.bytesPerToken.Load(), OutputTokens: m.outputTokens.Load()})
		}
	}
	v.Sort()
	return v
}

// Restore makes l know what v tells.
func (l *Learner) Restore(v *pool.LearnedView) {
	l.newTokens.Store(sane(v.WorkTokens))
	l.seconds.Store(sane(v.RequestSeconds))
	l.rate.Store(sane(v.PrefillTokensPerSecond))
	l.rest.bytesPerToken.Store(sane(v.BytesPerToken))
	l.rest.outputTokens.Store(sane(v.OutputTokens))
	for _, saved := range v.Models {
		m := l.adopt(pool.HashName(saved.ID))
		if m == &l.rest {
			continue
		}
		m.seen.Add(1)
		m.bytesPerToken.Store(sane(saved.BytesPerToken))
		m.outputTokens.Store(sane(saved.OutputTokens))
	}
}

// sane is v, or 0 for unknown where v can be no average.
func sane(v float64) float64 {
	if v > 0 && v < 1e12 {
		return v
	}
	return 0
}

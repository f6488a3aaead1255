package modelsim

import "slices"

// adapterSlots is vLLM's LRU worker LoRA manager: up to maxGPU adapters in GPU
// slots, up to maxCPU in host memory, those on the GPU among them.
type adapterSlots struct {
	maxGPU, maxCPU int
	gpu, cpu       []int32 // least recently used first

	running  []int32 // running requests by adapter
	inFlight []int32 // running and waiting requests by adapter
	active   int     // adapters with running > 0
}

// loadSource says where an adapter had to be loaded from.
type loadSource uint8

const (
	resident loadSource = iota
	fromHost
	fromDisk
)

func (a *adapterSlots) grow(id int32) {
	for int(id) >= len(a.running) {
		a.running = append(a.running, 0)
		a.inFlight = append(a.inFlight, 0)
	}
}

// admissible reports whether a request for id may join the running ones.
func (a *adapterSlots) admissible(id int32) bool {
	return a.running[id] > 0 || a.active < a.maxGPU
}

func (a *adapterSlots) start(id int32) {
	if a.running[id]++; a.running[id] == 1 {
		a.active++
	}
}

func (a *adapterSlots) stop(id int32) {
	if a.running[id]--; a.running[id] == 0 {
		a.active--
	}
}

// use makes id resident and most recently used, evicting idle adapters. The
// caller has made sure that a slot is free or idle, by admissible and start.
func (a *adapterSlots) use(id int32) loadSource {
	if i := slices.Index(a.gpu, id); i >= 0 {
		touch(a.gpu, i)
		touch(a.cpu, slices.Index(a.cpu, id))
		return resident
	}
	if len(a.gpu) >= a.maxGPU {
		i := slices.IndexFunc(a.gpu, func(x int32) bool { return a.running[x] == 0 })
		if i < 0 {
			panic("BUG: adapter scheduled without a free slot")
		}
		a.gpu = slices.Delete(a.gpu, i, i+1)
	}
	a.gpu = append(a.gpu, id)
	if i := slices.Index(a.cpu, id); i >= 0 {
		touch(a.cpu, i)
		return fromHost
	}
	if len(a.cpu) >= a.maxCPU {
		i := slices.IndexFunc(a.cpu, func(x int32) bool { return !slices.Contains(a.gpu, x) })
		a.cpu = slices.Delete(a.cpu, i, i+1)
	}
	a.cpu = append(a.cpu, id)
	return fromDisk
}

// touch moves lru[i] to the most recently used end.
func touch(lru []int32, i int) {
	id := lru[i]
	copy(lru[i:], lru[i+1:])
	lru[len(lru)-1] = id
}

package proxybench

import (
	"io"
	"time"
)

// Options are what is measured, and how long.
type Options struct {
	Scenarios  []string      // by name; default all
	Candidates []string      // by name; default those of each scenario
	Rounds     int           // default 5
	Window     time.Duration // of a measurement, unless its scenario says otherwise; default 1 s
	Quick      bool          // a smoke test: one round, short windows, no scenario that takes long
	// Self is the command line that runs kvgate: its program, and what comes before the name of a command.
	Self []string
	// Dir is where configurations and logs of the candidates go; default a temporary directory.
	Dir string
	// ProfileDir takes profiles of kvgate: one for each scenario it runs in, of 5 s of processor time after the last
	// round, and of allocations and mutexes. "": none.
	ProfileDir string
	// Strace counts system calls with strace, in an extra round of the scenarios with one rate.
	Strace bool
	// Against is another build of kvgate, a program, to be compared with: the candidate "other 64".
	Against  string
	Progress io.Writer // a line per scenario and round; nil: silence
}

// A Sample is one measurement: one candidate in one scenario and round.
type Sample struct {
	Scenario, Candidate string
	Round               int
	Seconds             float64
	Requests, Chunks    int
	Errors              int
	CPUSeconds          float64 // of the candidate: user and system
	SystemSeconds       float64 // of it, the kernel's; to 10 ms
	Reads, Writes       int     // system calls of these kinds; those of recv and send aside
	Waits               int     // times that one of its threads went to sleep
	P50, P99, P999      float64 // seconds, from when a request was due
	ConnBytes           float64 // resident memory per connection; only where the scenario measures memory
	Allocations         float64 // kvgate: per request
	GCSeconds           float64 // kvgate: of CPUSeconds and before, for collecting garbage
	GCOf                float64 // the processor time that GCSeconds is a part of
}

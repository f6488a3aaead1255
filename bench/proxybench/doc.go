// Package proxybench measures what kvgate costs beside other proxies: CPU time, latency and memory of the proxy's own
// process, in front of a model server that answers at once.
//
// One process is the model server and all clients, one epoll loop on a core of its own, so that it takes less time per
// request than any candidate. The candidates run on another core, each a process by itself: kvgate as `kvgate serve`,
// nginx and HAProxy where they are installed, and two small proxies of this package. In a scenario they take turns, a
// short window each, for several rounds; what is reported are medians over the rounds. Only ratios within one run mean
// anything.
//
// All traffic is on loopback. It runs on Linux alone.
package proxybench

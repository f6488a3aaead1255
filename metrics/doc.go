// Package metrics reads model servers: it scrapes their metrics pages and their lists of models in the background, and
// feeds what they say into a [kvgate/pool.Table].
//
// A page is scanned line by line for the families that a dialect names; only their series reach the Prometheus parser. A
// dialect is data: which series of which server mean which number. What a page says is first a [Raw], as the server counts
// it, and then a [kvgate/pool.Load], as the gateway counts it. What a page lacks is unknown, never zero.
//
// Requests go over connections of the package's own, since a scrape over net/http's transport costs twice as much;
// heads are parsed by net/http. The package must not import fasthttp, a logger, or the packages that decide and
// forward; state changes are reported through callbacks.
package metrics

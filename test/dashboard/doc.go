// Package dashboard looks at kvgate's dashboard with a real browser, Chromium without a window: what it shows of healthy,
// saturated, failing, empty and large fleets, how it is worked by keyboard, what its actions do, and what it costs the
// gateway. It runs the program, with its own simulated model servers, and leaves screenshots in dist/dashboard.
package dashboard

// Package proxy is the data path: it reads a request, resolves its model, lets it in, has an endpoint chosen, forwards,
// moves on where that is safe, and accounts for it exactly once. It is the only package besides the simulator that may
// import fasthttp; it must not import admin, gateway or cli.
package proxy

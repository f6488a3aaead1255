package metrics

// none is for servers that have no page, such as Ollama: they are routed by what this gateway has sent them.
var none = register(Dialect{
	Name: "none",
	Doc:  "Servers without metrics, such as Ollama: no page is read, and this gateway's own requests are all it knows.",
})

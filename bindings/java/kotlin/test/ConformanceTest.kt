/** Runs the conformance script in Kotlin: ROOT FILE, the project's folder and where a session is saved. */
package thimble

import java.io.File
import kotlin.math.roundToLong

fun main(arguments: Array<String>) {
    val root = File(arguments[0])
    val script = BindingTest.`object`(Json.parse(File(root, "bindings/conformance/script.json").readText()))
    val steps = script["steps"] as List<*>
    val runner = KotlinRunner(root, File(arguments[1]))
    for (step in steps.map { BindingTest.`object`(it) }) {
        val given = runner.run(Arguments(step))
        check(BindingTest.same(given, step["expect"])) { "$step\n gave $given" }
    }
    println("${steps.size} steps give what they must")
}

/** The argument of a step. */
private class Arguments(private val fields: Map<String, Any>) : Map<String, Any> by fields {
    fun text(name: String) = fields.getValue(name) as String
    fun long(name: String) = fields.getValue(name) as Long
    fun int(name: String) = long(name).toInt()
    fun flag(name: String) = fields[name] == true
    fun ids() = (fields.getValue("ids") as List<*>).map { (it as Long).toInt() }.toIntArray()
    fun options() = BindingTest.`object`(fields["options"])
    fun tokenizing() = (if (flag("bos")) Thimble.TOKENIZE_ADD_BOS else 0) or (if (flag("special")) Thimble.TOKENIZE_PARSE_SPECIAL else 0)
}

/** A result, in the types that Json has. */
private fun said(vararg fields: Pair<String, Any>) = fields.associate { (name, value) ->
    name to when (value) {
        is Int -> value.toLong()
        is IntArray -> value.map { it.toLong() }
        is FloatArray -> value.map { it.toDouble() }
        else -> value
    }
}

private fun at(session: Session) = said("position" to session.stats().position)

private class KotlinRunner(private val root: File, private val file: File) {
    private lateinit var model: Model
    private lateinit var heads: Heads
    private lateinit var shape: ModelInfo
    private val sessions = HashMap<String, Session>()

    fun run(step: Arguments): Map<String, Any> = try {
        sessions[step["session"]]?.let { ofSession(it, step) } ?: ofModel(step)
    } catch (error: ThimbleException) {
        said("error" to error.name())
    }

    private fun ofModel(step: Arguments): Map<String, Any> = when (step.text("do")) {
        "open" -> {
            model = Model.open(File(root, step.text("model")).toPath())
            heads = model.heads(File(root, step.text("heads")).toPath())
            said("warnings" to model.warnings().size)
        }
        "info" -> {
            shape = model.info()
            with(shape) {
                said("layers" to layers, "kv_heads" to kvHeads, "vocab" to vocab, "context_length" to contextLength, "eos" to eos,
                    "parameters" to parameters, "architecture" to architecture, "quantization" to quantization,
                    "chat_format" to chatFormat, "window_layers" to windowLayers)
            }
        }
        "tokenize" -> said("ids" to model.tokenize(step.text("text"), step.tokenizing()))
        "detokenize" -> said("text" to model.detokenize(step.ids(), if (step.flag("special")) Thimble.DETOKENIZE_SPECIAL else 0))
        "ends" -> said("ends" to model.tokenEnds(step.int("token")))
        "chat" -> {
            val chat = Chat()
            for (message in step.getValue("messages") as List<*>)
                Arguments(BindingTest.`object`(message)).run { chat.add(text("role"), text("content")) }
            said("text" to model.chat(chat))
        }
        "plan" -> with(model.plan(given(step.options()))) {
            said("pool" to pool, "capacity" to capacity, "chunk" to chunk, "budget" to budget,
                "dense_bytes_per_token" to denseBytesPerToken, "fits" to (total <= budget))
        }
        "refused" -> refused(given(step.options()))
        "largest_pool" -> {
            val settings = given(step.options())
            val largest = model.largestPool(settings)
            said("fits" to fits(settings) { pool = largest }, "one_more_does_not" to !fits(settings) { pool = largest + 1 })
        }
        "create" -> at(model.session(given(step.options())).also { sessions[step.text("session")] = it })
        "saved" -> said("position" to Arguments(BindingTest.`object`(Json.parse(Thimble.sessionFileInfo(file.toPath())))).long("position"),
            "note" to String(Thimble.sessionFileNote(file.toPath())))
        "close_model" -> {
            model.close()
            heads.close()
            said("closed" to true)
        }
        else -> error("no such step: $step")
    }

    private fun ofSession(session: Session, step: Arguments): Map<String, Any> {
        when (step.text("do")) {
            "read" -> read(session, step)
            "accept" -> session.accept(step.int("token"))
            "flush" -> session.flush()
            "reset" -> session.reset()
            "rewind" -> session.rewind(step.long("position"))
            "restore" -> session.restore(file.toPath())
            "clone" -> sessions[step.text("as")] = session.cloned()
            else -> return asked(session, step)
        }
        return at(session)
    }

    private fun asked(session: Session, step: Arguments): Map<String, Any> = when (step.text("do")) {
        "step" -> {
            val tokens = IntArray(step.int("count"))
            val text = tokens.indices.joinToString("") { i -> session.text(session.step().also { tokens[i] = it }) }
            said("tokens" to tokens, "text" to text)
        }
        "interrupt" -> said("asked" to true).also { session.interrupt() }
        "score" -> said("logprobs" to session.score(step.ids()))
        "logits" -> session.logits().let { logits -> said("count" to logits.size, "best" to logits.indices.maxBy { logits[it] }!!) }
        "sample" -> {
            session.setSampler(Sampler().apply {
                temperature = (step.getValue("temperature") as Number).toFloat()
                topK = step.int("top_k")
                seed = step.long("seed")
            })
            said("set" to true)
        }
        "grammar" -> {
            if (step.text("kind") == "none") session.setGrammar(null)
            else model.grammar(Grammar.Kind.valueOf(step.text("kind").toUpperCase()), step.text("text")).use { session.setGrammar(it) }
            said("set" to true)
        }
        "save" -> said("saved" to true).also { session.save(file.toPath(), step.text("note").toByteArray()) }
        "kept" -> session.kept(step.int("layer"), step.int("kv_head")).let { kept ->
            if (step.flag("only_count")) said("count" to kept.size) else said("positions" to kept)
        }
        "stored_by_position" -> session.storedByPosition().let { stored ->
            said("count" to stored.size, "entries" to (stored.sumByDouble { it.toDouble() } * shape.layers * shape.kvHeads).roundToLong())
        }
        "kept_by_position" -> session.keptByPosition().let { kept ->
            said("count" to kept.size, "entries" to (kept.sumByDouble { it.toDouble() } * shape.layers * shape.kvHeads).roundToLong(),
                "attention_in_thousandths" to (session.attendedByPosition().sumByDouble { it.toDouble() } * 1000).roundToLong())
        }
        "stats" -> with(session.stats()) {
            said("position" to position, "waiting" to waiting, "entries" to entries, "evictions" to evictions,
                "generated" to generated, "prefill_tokens" to prefillTokens)
        }
        "memory" -> with(session.memory()) {
            said("pool" to pool, "capacity" to capacity, "holds_some" to (allocated > 0),
                "within_the_budget" to (allocated <= budget))
        }
        "decided" -> with(session.options()) {
            said("pool" to pool, "chunk" to chunk, "stabilizers" to stabilizers, "local" to local,
                "protect_init" to protectInit, "max_new" to maxNew, "select_prefill" to selectPrefill)
        }
        "shrink" -> said("freed_some" to (session.shrink(step.int("pool")) > 0))
        "close" -> said("closed" to true).also { sessions.remove(step.text("session"))!!.close() }
        else -> error("no such step: $step")
    }

    private fun read(session: Session, step: Arguments) {
        val text = (step["text"] as String?)?.toByteArray() ?: File(root, step.text("file")).readBytes().copyOf(step.int("bytes"))
        val ids = model.tokenize(text, step.tokenizing()).toList()
        ids.chunked(if ("piece" in step) step.int("piece") else ids.size).forEach { session.feed(it.toIntArray()) }
    }

    private fun refused(settings: Options): Map<String, Any> = try {
        model.session(settings).use { at(it) }
    } catch (error: ThimbleException) {
        val enough = settings.budgetBytes + error.bytesMissing
        said("code" to error.code, "name" to error.name(), "says_why" to !error.message.isNullOrEmpty(),
            "bytes_missing_is_enough" to fits(settings) { budgetBytes = enough },
            "a_byte_less_is_not" to !fits(settings) { budgetBytes = enough - 1 })
    }

    private fun fits(settings: Options, change: Options.() -> Unit): Boolean = try {
        model.plan(settings.apply(change))
        true
    } catch (error: ThimbleException) {
        false
    }

    private fun given(settings: Map<String, Any>): Options = options {
        device = "cpu"
        for ((name, value) in settings) {
            val number = (value as? Long)?.toInt() ?: 0
            when (name) {
                "threads" -> threads = number
                "budget_bytes" -> budgetBytes = value as Long
                "retention", "selection" -> {
                    val constant = Thimble::class.java.getField("${name}_$value".toUpperCase()).getInt(null)
                    if (name == "retention") retention = constant else selection = constant
                }
                "pool" -> pool = number
                "chunk" -> chunk = number
                "max_new" -> maxNew = number
                "select_k" -> selectK = number
                "watch" -> watch = number
                "heads" -> heads = this@KotlinRunner.heads
                "draft" -> draft = Thimble::class.java.getField("DRAFT_$value".toUpperCase()).getInt(null)
                "draft_tokens" -> draftTokens = number
                "draft_model" -> draftModel = this@KotlinRunner.model
                else -> error("no such option: $name")
            }
        }
    }
}

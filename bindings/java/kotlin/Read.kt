import java.io.File
import thimble.Model
import thimble.Thimble
import thimble.answer
import thimble.options
import thimble.prompt

/** Reads a text inside 64 MiB and streams what comes next: MODEL.gguf TEXT.txt */
fun main(arguments: Array<String>) {
    val settings = options {
        budgetBytes = 64L shl 20
        retention = Thimble.RETENTION_WINDOW
        pool = 1024
    }
    Model.open(File(arguments[0]).toPath()).use { model ->
        model.session(settings).use { session ->
            session.feed(model.prompt(File(arguments[1]).readText()))
            session.answer(64).forEach(::print)
            println()
        }
    }
}

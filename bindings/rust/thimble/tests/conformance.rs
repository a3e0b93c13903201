//! Runs the steps of the conformance script (bindings/conformance/README.md). $THIMBLE_ROOT is the project's folder.
mod json;

use std::collections::BTreeMap;
use std::path::PathBuf;

use json::Json;
use thimble::{Chat, Draft, Heads, Message, Model, ModelInfo, Options, Result, Retention, Sampler, Selection, Session};

fn in_root(path: &str) -> PathBuf {
    PathBuf::from(std::env::var("THIMBLE_ROOT").expect("THIMBLE_ROOT is set")).join(path)
}

fn object<const N: usize>(fields: [(&str, Json); N]) -> Json {
    Json::Object(fields.into_iter().map(|(name, value)| (name.to_string(), value)).collect())
}

fn whole(number: impl TryInto<i64>) -> Json {
    Json::Whole(number.try_into().ok().expect("the number fits"))
}

fn wholes(numbers: &[i32]) -> Json {
    Json::List(numbers.iter().map(|&number| whole(number)).collect())
}

fn numbers(list: &[Json]) -> Vec<i32> {
    let number = |item: &Json| match item {
        Json::Whole(number) => *number as i32,
        other => panic!("no whole number: {:?}", other),
    };
    list.iter().map(number).collect()
}

fn position(session: &mut Session) -> Result<Json> {
    Ok(object([("position", whole(session.stats()?.position))]))
}

fn sum(shares: &[f32]) -> f64 {
    shares.iter().map(|&share| share as f64).sum()
}

struct Runner {
    file: PathBuf,
    model: Option<Model>,
    heads: Option<Heads>,
    info: Option<ModelInfo>,
    sessions: BTreeMap<String, Session>,
}

impl Runner {
    fn model(&self) -> &Model {
        self.model.as_ref().expect("a model is open")
    }

    fn run(&mut self, step: &Json) -> Json {
        self.result(step).unwrap_or_else(|error| object([("error", Json::Text(error.name().to_string()))]))
    }

    fn result(&mut self, step: &Json) -> Result<Json> {
        match step.text("do") {
            "open" => self.open(step),
            "info" => self.info(),
            "tokenize" => Ok(object([("ids", wholes(&self.tokenize(step.text("text").as_bytes(), step)?))])),
            "detokenize" => {
                let ids = numbers(step.list("ids"));
                Ok(object([("text", Json::Text(self.model().detokenize(&ids, step.flag("special"))?))]))
            }
            "ends" => Ok(object([("ends", Json::Bool(self.model().token_ends(step.whole("token") as i32)))])),
            "chat" => self.chat(step),
            "plan" => self.plan(&self.options(step)),
            "refused" => self.refused(step),
            "largest_pool" => {
                let pool = self.model().largest_pool(&self.options(step))?;
                let fits = |pool| self.model().plan(&self.options(step).pool(pool)).is_ok();
                Ok(object([("fits", Json::Bool(fits(pool))), ("one_more_does_not", Json::Bool(!fits(pool + 1)))]))
            }
            "create" => {
                let mut session = self.model().session(&self.options(step))?;
                let result = position(&mut session);
                self.sessions.insert(step.text("session").to_string(), session);
                result
            }
            "saved" => {
                let info = Json::parse(&thimble::session_file_info(&self.file)?);
                let note = String::from_utf8(thimble::session_file_note(&self.file)?).expect("the note was a text");
                Ok(object([("position", whole(info.whole("position"))), ("note", Json::Text(note))]))
            }
            "close_model" => {
                self.model = None;
                self.heads = None;
                Ok(object([("closed", Json::Bool(true))]))
            }
            _ => self.of_session(step),
        }
    }

    fn of_session(&mut self, step: &Json) -> Result<Json> {
        let name = step.text("session");
        if step.text("do") == "close" {
            self.sessions.remove(name).expect("it is open");
            return Ok(object([("closed", Json::Bool(true))]));
        }
        let mut session = self.sessions.remove(name).expect("it is open");
        let result = self.with_session(&mut session, step);
        self.sessions.insert(name.to_string(), session);
        result
    }

    fn with_session(&mut self, session: &mut Session, step: &Json) -> Result<Json> {
        match step.text("do") {
            "read" => self.read(session, step),
            "step" => {
                let (mut tokens, mut text) = (Vec::new(), String::new());
                for _ in 0..step.whole("count") {
                    let token = session.step()?;
                    tokens.push(token);
                    text += &session.text(token)?;
                }
                Ok(object([("tokens", wholes(&tokens)), ("text", Json::Text(text))]))
            }
            "accept" => session.accept(step.whole("token") as i32).and_then(|()| position(session)),
            "flush" => session.flush().and_then(|()| position(session)),
            "reset" => session.reset().and_then(|()| position(session)),
            "rewind" => session.rewind(step.whole("position") as u64).and_then(|()| position(session)),
            "restore" => session.restore(&self.file).and_then(|()| position(session)),
            "interrupt" => {
                session.interrupter().interrupt();
                Ok(object([("asked", Json::Bool(true))]))
            }
            "score" => {
                let logprobs = session.score(&numbers(step.list("ids")))?;
                let list = logprobs.iter().map(|&value| Json::Real(value as f64)).collect();
                Ok(object([("logprobs", Json::List(list))]))
            }
            "logits" => {
                let logits = session.logits()?;
                let best = (0..logits.len()).reduce(|a, b| if logits[b] > logits[a] { b } else { a });
                Ok(object([("count", whole(logits.len())), ("best", whole(best.expect("there are some")))]))
            }
            "sample" => {
                let sampler = Sampler::new()
                    .temperature(step.real("temperature") as f32)
                    .top_k(step.whole("top_k") as u32)
                    .seed(step.whole("seed") as u64);
                session.set_sampler(&sampler)?;
                Ok(object([("set", Json::Bool(true))]))
            }
            "grammar" => {
                let model = self.model.as_ref().expect("a model is open");
                let grammar = match step.text("kind") {
                    "none" => None,
                    "json_schema" => Some(model.json_schema(step.text("text"))?),
                    "regex" => Some(model.regex(step.text("text"))?),
                    _ => Some(model.gbnf(step.text("text"))?),
                };
                session.set_grammar(grammar.as_ref())?;
                Ok(object([("set", Json::Bool(true))]))
            }
            "clone" => {
                let mut twin = session.try_clone()?;
                let result = position(&mut twin);
                self.sessions.insert(step.text("as").to_string(), twin);
                result
            }
            "save" => {
                session.save(&self.file, step.text("note").as_bytes())?;
                Ok(object([("saved", Json::Bool(true))]))
            }
            "kept" => {
                let kept = session.kept(step.whole("layer") as u32, step.whole("kv_head") as u32)?;
                if step.flag("only_count") {
                    return Ok(object([("count", whole(kept.len()))]));
                }
                Ok(object([("positions", wholes(&kept))]))
            }
            "stored_by_position" => {
                let stored = session.stored_by_position()?;
                let info = self.info.as_ref().expect("it was asked for");
                let entries = sum(&stored) * f64::from(info.layers) * f64::from(info.kv_heads);
                Ok(object([("count", whole(stored.len())), ("entries", whole(entries.round() as i64))]))
            }
            "kept_by_position" => {
                let (kept, attended) = (session.kept_by_position()?, session.attended_by_position()?);
                let info = self.info.as_ref().expect("it was asked for");
                let entries = sum(&kept) * f64::from(info.layers) * f64::from(info.kv_heads);
                Ok(object([
                    ("count", whole(kept.len())),
                    ("entries", whole(entries.round() as i64)),
                    ("attention_in_thousandths", whole((sum(&attended) * 1000.0).round() as i64)),
                ]))
            }
            "stats" => {
                let stats = session.stats()?;
                Ok(object([
                    ("position", whole(stats.position)),
                    ("waiting", whole(stats.waiting)),
                    ("entries", whole(stats.entries)),
                    ("evictions", whole(stats.evictions)),
                    ("generated", whole(stats.generated)),
                    ("prefill_tokens", whole(stats.prefill_tokens)),
                ]))
            }
            "decided" => {
                let options = session.options()?;
                let options = options.fields();
                Ok(object([
                    ("pool", whole(options.pool)),
                    ("chunk", whole(options.chunk)),
                    ("stabilizers", whole(options.stabilizers)),
                    ("local", whole(options.local)),
                    ("protect_init", whole(options.protect_init)),
                    ("max_new", whole(options.max_new)),
                    ("select_prefill", whole(options.select_prefill)),
                ]))
            }
            "memory" => {
                let memory = session.memory()?;
                Ok(object([
                    ("pool", whole(memory.pool)),
                    ("capacity", whole(memory.capacity)),
                    ("holds_some", Json::Bool(memory.allocated > 0)),
                    ("within_the_budget", Json::Bool(memory.allocated <= memory.budget)),
                ]))
            }
            "shrink" => Ok(object([("freed_some", Json::Bool(session.shrink(step.whole("pool") as u32)? > 0))])),
            verb => panic!("no such step: {}", verb),
        }
    }

    fn open(&mut self, step: &Json) -> Result<Json> {
        let model = Model::open(in_root(step.text("model")))?;
        self.heads = Some(model.heads(in_root(step.text("heads")))?);
        let warnings = model.warnings().len();
        self.model = Some(model);
        Ok(object([("warnings", whole(warnings))]))
    }

    fn info(&mut self) -> Result<Json> {
        let info = self.model().info()?;
        self.info = Some(info);
        Ok(object([
            ("layers", whole(info.layers)),
            ("kv_heads", whole(info.kv_heads)),
            ("vocab", whole(info.vocab)),
            ("context_length", whole(info.context_length)),
            ("eos", whole(info.eos)),
            ("parameters", whole(info.parameters)),
            ("architecture", Json::Text(info.architecture())),
            ("quantization", Json::Text(info.quantization())),
            ("chat_format", Json::Text(info.chat_format())),
            ("window_layers", whole(info.window_layers)),
        ]))
    }

    fn tokenize(&self, text: &[u8], step: &Json) -> Result<Vec<i32>> {
        let bos = if step.flag("bos") { thimble::ADD_BOS } else { 0 };
        let special = if step.flag("special") { thimble::PARSE_SPECIAL } else { 0 };
        self.model().tokenize(text, bos | special)
    }

    fn chat(&self, step: &Json) -> Result<Json> {
        let message = |json| Message { role: Json::text(json, "role"), content: Json::text(json, "content") };
        let messages: Vec<Message<'_>> = step.list("messages").iter().map(message).collect();
        Ok(object([("text", Json::Text(self.model().chat(&messages, &Chat::default())?))]))
    }

    fn options(&self, step: &Json) -> Options {
        let mut options = Options::new().device("cpu");
        let given = step.get("options").expect("the step has options");
        let fields = match given {
            Json::Object(fields) => fields,
            other => panic!("no object: {:?}", other),
        };
        for name in fields.keys() {
            options = match name.as_str() {
                "threads" => options.threads(given.whole(name) as u32),
                "budget_bytes" => options.budget_bytes(given.whole(name) as u64),
                "pool" => options.pool(given.whole(name) as u32),
                "chunk" => options.chunk(given.whole(name) as u32),
                "max_new" => options.max_new(given.whole(name) as u32),
                "watch" => options.watch(given.whole(name) as u32),
                "select_k" => options.select_k(given.whole(name) as u32),
                "heads" => options.heads(self.heads.as_ref().expect("heads are open")),
                "draft" => options.draft(match given.text(name) {
                    "model" => Draft::Model,
                    other => panic!("no such draft: {}", other),
                }),
                "draft_tokens" => options.draft_tokens(given.whole(name) as u32),
                "draft_model" => options.draft_model(self.model()),
                "retention" => options.retention(match given.text(name) {
                    "none" => Retention::None,
                    "window" => Retention::Window,
                    other => panic!("no such retention: {}", other),
                }),
                "selection" => options.selection(match given.text(name) {
                    "tokenselect" => Selection::TokenSelect,
                    other => panic!("no such selection: {}", other),
                }),
                other => panic!("no such option: {}", other),
            };
        }
        options
    }

    fn plan(&self, options: &Options) -> Result<Json> {
        let memory = self.model().plan(options)?;
        Ok(object([
            ("pool", whole(memory.pool)),
            ("capacity", whole(memory.capacity)),
            ("chunk", whole(memory.chunk)),
            ("budget", whole(memory.budget)),
            ("dense_bytes_per_token", whole(memory.dense_bytes_per_token)),
            ("fits", Json::Bool(memory.total <= memory.budget)),
        ]))
    }

    fn refused(&self, step: &Json) -> Result<Json> {
        let error = match self.model().session(&self.options(step)) {
            Ok(_) => return Ok(object([])),
            Err(error) => error,
        };
        let budget = step.get("options").expect("the step has options").whole("budget_bytes") as u64;
        let enough = budget + error.bytes_missing;
        let fits = |budget| self.model().plan(&self.options(step).budget_bytes(budget)).is_ok();
        Ok(object([
            ("code", whole(error.code)),
            ("name", Json::Text(error.name().to_string())),
            ("says_why", Json::Bool(!error.message.is_empty())),
            ("bytes_missing_is_enough", Json::Bool(fits(enough))),
            ("a_byte_less_is_not", Json::Bool(!fits(enough - 1))),
        ]))
    }

    fn read(&self, session: &mut Session, step: &Json) -> Result<Json> {
        let text = match step.get("text") {
            Some(Json::Text(text)) => text.clone().into_bytes(),
            _ => {
                let mut bytes = std::fs::read(in_root(step.text("file"))).expect("the file can be read");
                bytes.truncate(step.whole("bytes") as usize);
                bytes
            }
        };
        // The model may be closed by now, the session's is not.
        let bos = if step.flag("bos") { thimble::ADD_BOS } else { 0 };
        let ids = session.model().tokenize(text, bos)?;
        let piece = step.get("piece").map_or(ids.len(), |_| step.whole("piece") as usize);
        for piece in ids.chunks(piece) {
            session.feed(piece)?;
        }
        position(session)
    }
}

/// Numbers with a fraction may differ by a hundredth; everything else must be equal.
fn same(given: &Json, expected: &Json) -> bool {
    match (given, expected) {
        (Json::Real(a), Json::Real(b)) => (a - b).abs() <= 0.01,
        (Json::List(a), Json::List(b)) => a.len() == b.len() && a.iter().zip(b).all(|(a, b)| same(a, b)),
        (Json::Object(a), Json::Object(b)) => {
            a.len() == b.len() && a.iter().all(|(name, value)| b.get(name).map_or(false, |other| same(value, other)))
        }
        _ => given == expected,
    }
}

#[test]
fn every_step_gives_what_the_script_says() {
    let file = std::env::temp_dir().join(format!("thimble-conformance-{}", std::process::id()));
    let text = std::fs::read_to_string(in_root("bindings/conformance/script.json")).expect("the script can be read");
    let mut runner = Runner { file, model: None, heads: None, info: None, sessions: BTreeMap::new() };
    for step in Json::parse(&text).list("steps") {
        let given = runner.run(step);
        assert!(same(&given, step.get("expect").expect("expectations")), "{:?}\n gave {:?}", step, given);
    }
    let _ = std::fs::remove_file(&runner.file);
}

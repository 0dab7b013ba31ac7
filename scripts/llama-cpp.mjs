// Asks a real llama.cpp what it makes of a GGUF file.
//
//   node scripts/llama-cpp.mjs NODE_MODULES_DIR REQUEST.json
//
// NODE_MODULES_DIR is a folder that holds the npm package node-llama-cpp
// (`npm install --ignore-scripts node-llama-cpp`); its prebuilt CPU library is used.
//
// REQUEST.json, where everything but the model may be missing or null:
//   {"model": "model.gguf", "adapter": null | "lora.gguf", "texts": ["..."],
//    "prompts": [[1, 2, 3]], "max_new_tokens": 24,
//    "conversations": [[{"role": "user", "content": "..."}]]}
//
// Prints one JSON object:
//   ids            per text: its tokens, special tokens parsed, nothing added
//   with_added     per text: the same with the BOS and EOS that the file asks for
//   add_bos        whether the file asks for a BOS token; add_eos likewise
//   continuations  per prompt: the greedily chosen tokens, up to and including an
//                  end-of-generation token
//   rendered       per conversation: the file's chat template plus generation prompt
//   metadata       bos, eos, eot (ids or null) and architecture
//
// llama.cpp's warnings go to stderr. A failure is one sentence there and exit code 1.

import { readFile } from "node:fs/promises";
import path from "node:path";
import { pathToFileURL } from "node:url";

// Standard output is for the answer alone.
console.log = console.info = console.debug = console.error;

/** What llama.cpp complained about so far, as [level, message]. */
const complaints = [];

async function main() {
  const [modules, requestPath] = process.argv.slice(2);
  if (!modules || !requestPath) {
    throw new Error("usage: node llama-cpp.mjs NODE_MODULES_DIR REQUEST.json");
  }
  const request = JSON.parse(await readFile(requestPath, "utf8"));
  if (typeof request.model !== "string") throw new Error("the request names no model");
  const texts = request.texts ?? [];
  const prompts = request.prompts ?? [];
  const conversations = request.conversations ?? [];
  const maxNewTokens = request.max_new_tokens ?? 24;
  checkPrompts(prompts);

  const own = path.resolve(modules, "node-llama-cpp");
  const { getLlama } = await import(pathToFileURL(path.join(own, "dist", "index.js")));

  const llama = await getLlama({
    gpu: false,
    build: "never",
    skipDownload: true,
    logLevel: "warn",
    logger: (level, message) => complaints.push([level, message.trim()]),
  });
  const model = await llama.loadModel({
    modelPath: path.resolve(request.model),
    gpuLayers: 0,
    ignoreMemorySafetyChecks: true,
  });

  // node-llama-cpp counts a BOS or EOS that is not a control token as missing, and a missing one
  // is not added. It also says that no EOS is added where only BOS is missing: there the file's
  // own word holds, as it does for llama.cpp.
  const { tokens } = model;
  const ids = texts.map((text) => model.tokenize(text, true));
  const addBos = tokens.shouldPrependBosToken;
  const addEos =
    tokens.eos !== null &&
    (tokens.shouldAppendEosToken || model.fileInfo.metadata.tokenizer?.ggml?.add_eos_token === true);
  const first = addBos ? [tokens.bos] : [];
  const last = addEos ? [tokens.eos] : [];

  const answer = {
    ids,
    with_added: ids.map((list) => [...first, ...list, ...last]),
    add_bos: addBos,
    add_eos: addEos,
    continuations: await continueAll(model, prompts, maxNewTokens, request.adapter),
    rendered: renderAll(llama, model, conversations),
    metadata: {
      bos: tokens.bos,
      eos: tokens.eos,
      eot: tokens.eot,
      architecture: model.architecture,
    },
  };
  await llama.dispose();
  return answer;
}

function checkPrompts(prompts) {
  for (const [index, prompt] of prompts.entries()) {
    if (prompt.length === 0) throw new Error(`prompt ${index} is empty`);
    if (!prompt.every((id) => Number.isInteger(id) && id >= 0)) {
      throw new Error(`prompt ${index} holds something that is no token id`);
    }
  }
}

/** The greedy continuation of each prompt. */
async function continueAll(model, prompts, maxNewTokens, adapter) {
  if (prompts.length === 0 && !adapter) return [];

  // A full context would make node-llama-cpp drop the oldest tokens, and it calls a context full
  // one token early. So every prompt gets room for itself, its continuation and that one.
  // Beyond that, 512, but not more than the model was trained on.
  const needed = Math.max(2, ...prompts.map((prompt) => prompt.length + maxNewTokens + 1));
  const contextSize = Math.max(needed, Math.min(512, model.trainContextSize));

  // The most exact settings there are: keys and values kept in f32 and plain attention.
  // One thread is the fastest for tiny models.
  const context = await model.createContext({
    contextSize,
    batchSize: Math.min(64, contextSize),
    sequences: 1,
    threads: 1,
    flashAttention: false,
    experimentalKvCacheKeyType: "F32",
    experimentalKvCacheValueType: "F32",
    swaFullCache: true,
    ignoreMemorySafetyChecks: true,
    failedCreationRemedy: false,
    lora: adapter ? { adapters: [{ filePath: path.resolve(adapter), scale: 1 }] } : undefined,
  });
  const sequence = context.getSequence({
    contextShift: {
      strategy: () => {
        throw new Error("the context is too small");
      },
    },
  });

  const continuations = [];
  for (const prompt of prompts) {
    await sequence.clearHistory();
    continuations.push(await greedy(model, sequence, prompt, maxNewTokens));
  }
  await context.dispose();
  return continuations;
}

async function greedy(model, sequence, prompt, maxNewTokens) {
  const chosen = [];
  if (maxNewTokens === 0) return chosen;
  // With temperature 0 the likeliest token is taken, whatever the filters say;
  // they are switched off all the same.
  const options = { temperature: 0, minP: 0, topK: 0, topP: 1, yieldEogToken: true };
  for await (const token of sequence.evaluate(prompt, options)) {
    chosen.push(token);
    if (chosen.length === maxNewTokens || model.isEogToken(token)) break;
  }
  return chosen;
}

/** Each conversation as the file's own chat template writes it. */
function renderAll(llama, model, conversations) {
  if (conversations.length === 0) return [];
  const source = model.fileInfo.metadata.tokenizer?.chat_template;
  if (typeof source !== "string") throw new Error("the file holds no chat template");
  const template = new llama._bindings.AddonJinjaRenderer(source);
  return conversations.map((messages) =>
    template.render({
      messages,
      // As in transformers: templates test whether these are none.
      tools: null,
      documents: null,
      bos_token: model.tokens.bosString ?? "",
      eos_token: model.tokens.eosString ?? "",
      add_generation_prompt: true,
    }),
  );
}

const oneLine = (text) => text.replace(/\s+/g, " ").trim();

try {
  const answer = await main();
  for (const [level, message] of complaints) console.error(`${level}: ${oneLine(message)}`);
  process.stdout.write(JSON.stringify(answer) + "\n");
} catch (error) {
  // node-llama-cpp only says that loading failed; llama.cpp's first error says why.
  const why = complaints.find(([level]) => level === "error" || level === "fatal");
  const sentence = oneLine(error.message) + (why ? `: ${oneLine(why[1])}` : "");
  process.stderr.write(`llama-cpp.mjs: ${sentence}\n`);
  process.exitCode = 1;
}

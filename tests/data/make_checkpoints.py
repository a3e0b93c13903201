#!/usr/bin/env python3
"""Writes the checkpoints of this folder with Python's own pickle, as torch.save lays them out; torch is not needed.

The classes below stand for torch's and numpy's: pickle writes their names, and nothing of them is ever run. The shapes
are those of tests/support/tiny_model.h; element i of a tensor is ((7 i + 13 seed) mod 255 - 127) / 32, which float16
and bfloat16 hold exactly.

  python3 tests/data/make_checkpoints.py
"""
import collections
import io
import os
import pickle
import struct
import sys
import types
import zipfile

HERE = os.path.dirname(os.path.abspath(__file__))
LAYERS, WIDTH, HEADS, KV_HEADS, HEAD_DIM = 2, 8, 2, 1, 4


def module(name):
    made = types.ModuleType(name)
    sys.modules[name] = made
    if '.' in name:
        parent, child = name.rsplit('.', 1)
        setattr(sys.modules.get(parent) or module(parent), child, made)
    return made


def function(owner, name):
    def stand_in(*_):
        raise RuntimeError('nothing of this is ever run')
    stand_in.__module__, stand_in.__name__, stand_in.__qualname__ = owner.__name__, name, name
    setattr(owner, name, stand_in)
    return stand_in


def class_of(owner, name):
    made = type(name, (), {'__module__': owner.__name__})
    setattr(owner, name, made)
    return made


torch, torch_utils = module('torch'), module('torch._utils')
rebuild_tensor = function(torch_utils, '_rebuild_tensor_v2')
rebuild_parameter = function(torch_utils, '_rebuild_parameter')
STORAGES = {t: class_of(torch, t + 'Storage') for t in ('Float', 'Half', 'BFloat16')}
numpy, multiarray = module('numpy'), module('numpy.core.multiarray')
reconstruct = function(multiarray, '_reconstruct')
numpy_array, numpy_dtype = class_of(numpy, 'ndarray'), class_of(numpy, 'dtype')


def packed(values, kind):
    if kind == 'Float':
        return struct.pack('<%df' % len(values), *values)
    if kind == 'Half':
        return struct.pack('<%de' % len(values), *values)
    return b''.join(struct.pack('<f', v)[2:] for v in values)  # bfloat16: the upper half


class Tensor:
    count = 0

    def __init__(self, shape, seed, kind, parameter=False):
        elements = 1
        for extent in shape:
            elements *= extent
        self.values = packed([((7 * i + 13 * seed) % 255 - 127) / 32 for i in range(elements)], kind)
        self.kind, self.shape, self.elements, self.parameter = kind, shape, elements, parameter
        self.key = str(Tensor.count)
        Tensor.count += 1

    def __reduce__(self):
        strides, stride = [], 1
        for extent in reversed(self.shape):
            strides.insert(0, stride)
            stride *= extent
        args = (Storage(self), 0, self.shape, tuple(strides), False, collections.OrderedDict())
        if not self.parameter:
            return rebuild_tensor, args
        return rebuild_parameter, (Plain(args), True, collections.OrderedDict())


class Plain:  # the tensor in a parameter
    def __init__(self, args):
        self.args = args

    def __reduce__(self):
        return rebuild_tensor, self.args


class Storage:
    def __init__(self, tensor):
        self.tensor = tensor


class Array:  # of numpy: what its __reduce__ gives
    def __reduce__(self):
        return reconstruct, (numpy_array, (0,), b'b'), (1, (2, 2), Type(), False, struct.pack('<4d', 1, 2, 3, 4))


class Type:
    def __reduce__(self):
        return numpy_dtype, ('f8', False, True), (3, '<', None, None, None, -1, -1, 0)


class Pickler(pickle.Pickler):
    def __init__(self, file, legacy):
        super().__init__(file, protocol=2)
        self.legacy, self.tensors = legacy, []

    def persistent_id(self, thing):
        if not isinstance(thing, Storage):
            return None
        tensor = thing.tensor
        self.tensors.append(tensor)
        name = ('storage', STORAGES[tensor.kind], tensor.key, 'cuda:0', tensor.elements)
        return name + (None,) if self.legacy else name


def save_zip(thing, name):
    data = io.BytesIO()
    pickler = Pickler(data, False)
    pickler.dump(thing)
    stem = os.path.splitext(name)[0]
    with zipfile.ZipFile(os.path.join(HERE, name), 'w', zipfile.ZIP_STORED) as out:
        def add(entry, content):
            info = zipfile.ZipInfo('%s/%s' % (stem, entry), (1980, 1, 1, 0, 0, 0))
            info.extra = b'FB\x05\x00ZZZZZ'  # torch pads with a field so that storages are aligned
            out.writestr(info, content)
        add('data.pkl', data.getvalue())
        add('byteorder', b'little')
        for tensor in pickler.tensors:
            add('data/' + tensor.key, tensor.values)
        add('version', b'3\n')


def save_legacy(thing, name):
    with open(os.path.join(HERE, name), 'wb') as out:
        pickle.dump(0x1950a86a20f9469cfc6c, out, protocol=2)
        pickle.dump(1001, out, protocol=2)
        system = {'protocol_version': 1001, 'little_endian': True, 'type_sizes': {'short': 2, 'int': 4, 'long': 4}}
        pickle.dump(system, out, protocol=2)
        pickler = Pickler(out, True)
        pickler.dump(thing)
        tensors = {t.key: t for t in pickler.tensors}
        pickle.dump(sorted(tensors), out, protocol=2)
        for key in sorted(tensors):
            out.write(struct.pack('<q', tensors[key].elements) + tensors[key].values)


def locret(kind, parameter):
    state, hidden, columns = collections.OrderedDict(), 3, (HEADS + 2 * KV_HEADS) * HEAD_DIM
    for i in range(LAYERS):
        prefix = 'model.layers.%d.self_attn.' % i
        state[prefix + 'fc1.weight'] = Tensor((hidden, columns), 2 * i, kind)
        state[prefix + 'fc2.weight'] = Tensor((KV_HEADS, hidden), 2 * i + 1, kind, parameter)
    state._metadata = collections.OrderedDict([('', {'version': 1})])
    return state


def sink():
    rank, sinks, group, layers = 4, 3, HEADS // KV_HEADS, []
    for i in range(LAYERS):
        q_rows, state = HEADS * rank, collections.OrderedDict()
        for n, (name, shape, kind) in enumerate([
                ('k_base', (KV_HEADS, 1, sinks, rank), 'Float'), ('b', (KV_HEADS, 1, group), 'BFloat16'),
                ('q_proj.weight', (q_rows, WIDTH), 'BFloat16'), ('q_proj.bias', (q_rows,), 'BFloat16'),
                ('k_proj.weight', (KV_HEADS * rank, WIDTH), 'BFloat16'),
                ('q_norm.weight', (rank,), 'Float'), ('k_norm.weight', (rank,), 'Float')]):
            state[name] = Tensor(shape, 7 * i + n, kind)
        layers.append(state)
    return {'module': layers, 'loss': Array(), 'acc': Array(), 'loss_train': [0.5, 0.25], 'acc_train': Array()}


class Evil:
    def __reduce__(self):
        return os.system, ('touch /tmp/thimble-was-run',)


save_zip(locret('BFloat16', False), 'locret-zip.pt')
save_legacy(locret('Half', True), 'locret-legacy.pt')
save_zip(sink(), 'sink-zip.pt')
save_legacy(sink(), 'sink-legacy.pt')
save_zip({'model.layers.0.self_attn.fc1.weight': Evil()}, 'runs-a-command.pt')
